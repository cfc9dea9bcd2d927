"""What the conductor's decisions take most of their time for, in C++. Everything works without it, more slowly."""

"""Readers of leased blocks in processes of their own, which a test can put to sleep: SIGSTOP, and clocks that stand
still meanwhile, as they do when a machine is suspended or a virtual one is paused."""

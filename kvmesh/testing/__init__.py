"""What only tests and benchmarks use. Product code never imports it (import-linter: floors)."""

"""`python -m kvmesh.cli`."""

from kvmesh.cli.app import main

main()

"""`python -m kvmesh.cli`."""

from kvmesh.loading import lasting_imports

with lasting_imports():
    from kvmesh.cli.app import main

main()

"""External instances: engines that are not kvmesh's own, as members of the mesh (docs/adr/0060-external-engines.md)."""

"""kvmesh under engines that are not its own."""

"""What a rank host can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.errors import ConfigError
from kvmesh.ranks.network import check_network
from kvmesh.ranks.transfer_config import TransferConfig


@dataclass(frozen=True, kw_only=True)
class RanksConfig(TransferConfig):
    """Has the settings of a machine that runs ranks for fronts on others; what belongs to the instance its front says.
    Raises ConfigError naming field and value when settings do not fit together."""

    instance_id: str = field(default="", metadata={"help": "Name in the mesh; empty: made from node_id and pid."})
    store: str = field(
        default="",
        metadata={
            "help": "Store masters, HOST:PORT,..., to which this rank host says that it is there, so that instances "
            "that ask for a number of rank hosts find it; empty: instances name its address."
        },
    )
    model: str = field(
        default="", metadata={"help": "Checkpoint folder on this machine; empty: the path that the front names."}
    )
    cache_dir: str = field(
        default="", metadata={"help": "Folder for digests of weights; empty: kvmesh in the user's cache folder."}
    )
    rank_network: str = field(
        default="",
        metadata={
            "help": "Interface, or network that one of this machine's interfaces is in (10.0.0.0/8), over which its "
            "ranks compute with others; empty: as their front says."
        },
    )
    ssd_path: str = field(
        default="",
        metadata={
            "help": "Folder for the SSD tiers of instances that have one, each in a folder of its name; empty: "
            "instances with an SSD tier are refused."
        },
    )
    warm_segment: str = field(
        default="",
        metadata={
            "help": "Folder in a tmpfs (/dev/shm/...), likewise for host memory that outlives its process; empty: "
            "instances with such memory are refused."
        },
    )
    max_ranks: int = field(default=64, metadata={"help": "Rank processes at once, of all instances.", "min": 1})

    def __post_init__(self) -> None:
        if self.max_ranks < 1:
            raise ConfigError(f"max_ranks={self.max_ranks}: at least 1", field="max_ranks")
        check_network(self.rank_network)
        self.check_transfer()

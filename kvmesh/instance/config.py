"""This module has the settings of a prefill or decode instance."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.blockservice.tiers.config import TierConfig
from kvmesh.engine.axes import Axes
from kvmesh.kvcache.keys import MAX_WEIGHTS_EPOCH
from kvmesh.ranks.transfer_config import listed


@dataclass(frozen=True, kw_only=True)
class InstanceConfig(TierConfig):
    """Has the settings common to prefill and decode; each service's config adds its own."""

    instance_id: str = field(default="", metadata={"help": "Name in the mesh; empty: made from role, node_id and pid."})
    model: str = field(default="", metadata={"help": "Checkpoint folder; needed."})
    served_name: str = field(default="", metadata={"help": "Model name clients use; empty: the folder's name."})
    conductor: str = field(default="127.0.0.1:0", metadata={"help": "Conductors, HOST:PORT,HOST:PORT,...; needed."})
    store: str = field(default="127.0.0.1:0", metadata={"help": "Store masters, HOST:PORT,HOST:PORT,...; needed."})
    weights_epoch: int = field(
        default=0,
        metadata={
            "help": "Number of these weights where an operator gives them one (reinforcement learning): KV is shared "
            "within one epoch alone; all instances of a model have the same.",
            "min": 0,
            "max": MAX_WEIGHTS_EPOCH,
        },
    )
    rollout_folders: str = field(
        default="",
        metadata={
            "help": "Folders, and prefixes of object storage (s3://bucket/steps), below which new weights may lie "
            "(docs/howto/rollouts.md), comma-separated; empty: the folder that the model's folder is in.",
            "metavar": "PATH,...",
        },
    )
    rollout_trainers: str = field(
        default="",
        metadata={
            "help": "Hosts and networks (10.0.0.0/8) of trainers whose memory may be read, comma-separated; empty: "
            "this host, and under TLS whoever has a certificate of the mesh.",
            "metavar": "HOST,...",
        },
    )
    cache_dir: str = field(
        default="",
        metadata={
            "help": "Folder for digests of weights whose own folder cannot be written; empty: kvmesh in the user's "
            "cache folder."
        },
    )
    dtype: str = field(
        default="auto",
        metadata={
            "help": "float32, bfloat16 or float16; auto: the checkpoint's on a GPU, and bfloat16 on a CPU that "
            "multiplies it (docs/internals/engine.md), else float32."
        },
    )
    device: str = field(
        default="cpu",
        metadata={"help": "Where ranks compute: cpu, cuda or cuda:N; see docs/reports/cuda.md."},
    )
    cuda_graphs: bool = field(default=True, metadata={"help": "On a GPU, replay steps as CUDA graphs."})
    async_steps: str = field(
        default="auto",
        metadata={
            "help": "Launch a decode step before the tokens of the one before it are read (docs/internals/engine.md); "
            "auto: on a GPU, with one rank.",
            "choices": ("auto", "on", "off"),
        },
    )
    block_tokens: int = field(default=64, metadata={"help": "Tokens a block: a power of two in 16..512."})
    num_pages: int = field(default=0, metadata={"help": "Device pages of a rank; 0: as many as memory_mb holds."})
    num_extents: int = field(default=0, metadata={"help": "Blocks of the host segment; 0: as many as pages."})
    cache_groups: bool = field(
        default=True,
        metadata={
            "help": "Keep a model whose layers keep different things (windows, chunks, states) group by group "
            "(docs/adr/0037-cache-groups.md), which all instances of that model must agree on."
        },
    )
    memory_mb: int = field(
        default=0,
        metadata={
            "help": "Device pages of a rank, MiB, when num_pages is 0; 0: what is left beside the weights and the "
            "largest step, of a GPU or of a share of this machine's available memory (docs/internals/engine.md).",
            "min": 0,
        },
    )
    room_mb: int = field(
        default=0,
        metadata={
            "help": "Host memory that a rank on a CPU may take in all where memory_mb is 0, MiB; 0: 70% of what is "
            "available, divided among device_instances.",
            "min": 0,
        },
    )
    device_instances: int = field(
        default=0,
        metadata={
            "help": "Instances that share one GPU, or this machine's (this container's) memory: where memory_mb is 0 "
            "each takes its part. 0: not known; a GPU is then taken whole, of host memory 25%.",
            "min": 0,
        },
    )
    threads: int = field(default=1, metadata={"help": "torch threads of a rank."})
    tensor_parallel: int = field(
        default=1,
        metadata={
            "help": "Rank processes that share the model, short for mesh=tp=N; see docs/operate/tensor-parallel.md.",
            "min": 1,
        },
    )
    mesh: str = field(
        default="",
        metadata={
            "help": "Along which axes rank processes share the model, in place of tensor_parallel: pp=4,tp=2 are four "
            "stages of layers of two ranks each (docs/operate/pipelines.md); cp=2, and of decode tp=2,dcp=2, are two "
            "that share the tokens of each context (docs/operate/context-parallel.md); dp=2,ep=dp are two ranks with "
            "requests of their own that share experts (docs/operate/data-parallel.md)."
        },
    )
    experts_cut: str = field(
        default="auto",
        metadata={
            "help": "How ranks share a mixture of experts: each has some columns of every expert, or some experts "
            "whole; auto: columns, unless they do not divide or are fewer than 64 (docs/operate/tensor-parallel.md).",
            "choices": ("auto", "columns", "whole"),
        },
    )
    rank_hosts: str = field(
        default="",
        metadata={
            "help": "Rank hosts (kvmesh serve ranks) on other machines, HOST:PORT,... or how many of those that the "
            "store masters know: this machine first, then each, has an equal part of the ranks "
            "(docs/operate/rank-hosts.md); empty: all are here.",
            "metavar": "N|HOST:PORT,...",
        },
    )
    rank_hosts_wait_ms: int = field(
        default=60_000,
        metadata={"help": "Rank hosts that are named may begin to answer so long after this instance.", "min": 1},
    )
    rank_network: str = field(
        default="",
        metadata={
            "help": "Interface of each host (eth1), or network that one of its interfaces is in (10.0.0.0/8), over "
            "which ranks on several hosts compute together. What they send is not encrypted: under TLS it must be "
            "named, which says that it is trusted. Empty: the way to the other hosts."
        },
    )
    rank_timeout_ms: int = field(
        default=30_000, metadata={"help": "Ranks that wait so long for one another in a step give up.", "min": 100}
    )
    max_context_tokens: int = field(default=0, metadata={"help": "Longest prompt + answer; 0: the model's."})
    rank_silence_ms: int = field(
        default=5000, metadata={"help": "A rank silent this long makes the instance not ready."}
    )
    store_high_percent: int = field(
        default=95,
        metadata={"help": "Above this share of the host segment the coldest blocks go.", "min": 1, "max": 100},
    )
    store_low_percent: int = field(default=90, metadata={"help": "... down to this share.", "min": 0, "max": 100})
    store_lease_ms: int = field(default=5_000, metadata={"help": "Longest lease given to readers, ms.", "min": 10})
    announce_ms: int = field(
        default=50, metadata={"help": "Changes of the node store are announced this often, ms.", "min": 1}
    )
    pull_timeout_ms: int = field(
        default=2_000, metadata={"help": "A prefix not fetched in so long is computed instead, ms.", "min": 1}
    )
    offload_percent: int = field(
        default=80,
        metadata={
            "help": "Above this share cold blocks are copied to pool nodes, if there are any.",
            "min": 0,
            "max": 100,
        },
    )

    @property
    def axes(self) -> Axes:
        """Along which axes rank processes share the model. Raises ConfigError as `Axes.of_settings` does."""
        return Axes.of_settings(self.mesh, self.tensor_parallel, "mesh", "tensor_parallel")

    @property
    def rank_host_list(self) -> tuple[str, ...]:
        """Addresses of rank hosts; none where they are still to be found."""
        return () if self.rank_host_count else listed(self.rank_hosts)

    @property
    def rank_host_count(self) -> int:
        """How many rank hosts are to be found among those that the store masters know; 0: they are named, or none."""
        return int(self.rank_hosts) if self.rank_hosts.isascii() and self.rank_hosts.isdecimal() else 0

"""What `kvmesh up` looks at before it starts anything: one clear error that names the flag, in the place of an instance
that dies."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

from kvmesh import extras
from kvmesh.blockservice.tiers.config import check_object_url, make_ssd_folder
from kvmesh.cli.up.plan import LOCALHOST, fixed_ports, segment_mb
from kvmesh.cli.up.settings import INSTANCES, MeshSettings
from kvmesh.errors import CheckpointError, ConfigError
from kvmesh.ranks.host_memory import available_bytes
from kvmesh.ranks.speculation import NO_DRAFTS, check_draft_folder, check_speculation
from kvmesh.rpc.addresses import is_loopback
from kvmesh.rpc.server import check_port, join
from kvmesh.transfer.segment_file import check_folder

REDIS_S = 2.0
MIB = 1 << 20


def check_own_ports(settings: MeshSettings) -> None:
    """Raise ConfigError that names the port in use and the flag that changes it."""
    if settings.join:
        return
    fixed = fixed_ports(settings)
    wanted = [("http_port", settings.http_port), ("grpc_port", settings.grpc_port)]
    wanted += [(f"{name.partition('-')[0]}_port", port) for name, port in fixed.items()]
    for key, port in wanted:
        try:
            check_port(settings.host, port, key)
        except ConfigError as err:
            if err.field == "host":
                raise
            flag = f"--{key.replace('_', '-')}"
            raise ConfigError(f"{err.message}; choose another with {flag}", field=key) from None


def check_reach(settings: MeshSettings) -> None:
    """Raise ConfigError when a name that others shall dial means this machine to itself, as host names often do."""
    if not settings.address:
        return
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(settings.address, None, type=socket.SOCK_STREAM)}
    except OSError as err:
        key = "advertise_host" if settings.advertise_host else "host"
        raise ConfigError(
            f"{key}={settings.address!r}: cannot be resolved ({err.strerror or err})", field=key
        ) from None
    if all(is_loopback(one) for one in found):
        told = ", ".join(sorted(found))
        why = f"is {told} on this machine, which no other reaches (see /etc/hosts): give the address itself"
        raise ConfigError(f"host={settings.address!r}: {why}", field="host")


def check_redis(settings: MeshSettings) -> None:
    """Raise ConfigError unless somebody listens where a Redis of somebody else's should be: without it no master leads.
    The password of a URL is not repeated."""
    if settings.redis in ("", "auto"):
        return
    parts = urlsplit(settings.redis)
    try:
        host, port = parts.hostname or LOCALHOST, parts.port or 6379
    except ValueError:  # of the port
        host, port = "", 0
    if not host or parts.scheme not in ("redis", "rediss", "unix"):
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        why = "must be auto, redis://host:port/0, rediss://... or unix://..."
        raise ConfigError(f"redis={shown!r}: {why}", field="redis")
    if parts.scheme == "unix":
        return
    try:
        socket.create_connection((host, port), REDIS_S).close()
    except OSError as err:
        why = f"nothing answers at {join(host, port)} ({err.strerror or err})"
        raise ConfigError(f"redis: {why}; start a Redis there, or let --redis auto do it", field="redis") from None


def check_ranks(settings: MeshSettings) -> None:
    """Raise ConfigError that names the flag unless every model can be shared by as many ranks, and each has a GPU where
    they compute on GPUs. Models are folders."""
    _check_gpus(settings)
    shared = {settings.axes_key(one): axes for one in INSTANCES if (axes := settings.axes(one)).world > 1}
    if not shared:
        return
    from kvmesh.engine.checkpoint import open_checkpoint
    from kvmesh.engine.parallel import check_shares
    from kvmesh.engine.stages import check_stages

    for served in settings.served:
        config = open_checkpoint(served.path).config
        for key, axes in shared.items():
            try:
                check_shares(config, axes)
                check_stages(config, axes)
                axes.check_blocks(settings.block_tokens)
            except ConfigError as err:
                why = err.message.partition(": ")[2]
                text = f"{key}={getattr(settings, key)}: {why} in {served.path} (--{key.replace('_', '-')})"
                raise ConfigError(text, field=key) from None


def check_drafts(settings: MeshSettings) -> None:
    """Raise ConfigError that names the flag unless all ranks that decode can verify drafts, and every model has the
    head, or can have the draft model, that is to make them. Models are folders."""
    try:
        check_draft_folder(settings.speculate, settings.draft_model)
    except ConfigError as err:
        raise ConfigError(f"{err.message} (--draft-model)", field=err.field) from None
    if settings.speculate == NO_DRAFTS:
        return
    for service in ("decode", "coupled"):
        if settings.groups(service):
            check_speculation(settings.speculate, settings.axes(service))
    if "mtp" not in settings.speculate and not settings.draft_model:
        return
    from kvmesh.engine.checkpoint import open_checkpoint
    from kvmesh.engine.draft_model import check_draft_model

    if settings.draft_model:
        draft = open_checkpoint(settings.draft_model)
        for served in settings.served:
            check_draft_model(draft, open_checkpoint(served.path))
        return
    for served in settings.served:
        try:
            open_checkpoint(served.path).check_mtp()
        except CheckpointError as err:
            text = f"speculate={settings.speculate!r}: {err.message} (--speculate)"
            raise ConfigError(text, field="speculate") from None


def _check_gpus(settings: MeshSettings) -> None:
    for service in INSTANCES:
        axes, hosts = settings.axes(service), settings.hosts(service)
        here = axes.world // hosts
        if here > 1 and any(group.device == "cuda" for group in settings.groups(service)):
            from kvmesh.instance.rank_lending import gpu_memory

            have = len(gpu_memory())
            if 0 < have < here:
                more = next(
                    n for n in range(hosts + 1, axes.world + 1) if not axes.world % n and axes.world // n <= have
                )
                key, flag = settings.axes_key(service), f"--{service}-hosts {more}"
                why = f"{here} ranks here want a GPU each, and this machine has {have}: give {flag}, and have other"
                why += " machines lend theirs (kvmesh up --join ... --as ranks)"
                raise ConfigError(f"{key}={getattr(settings, key)}: {why}", field=key)


def check_tiers(settings: MeshSettings) -> None:
    """Raise ConfigError unless what is to keep blocks beside the memory can: the SSD folder is made and can be written
    to, the folder of warm segments lies in a tmpfs with room for all of them, the object storage has a URL and its
    library is here."""
    if settings.ssd_path:
        folder = Path(settings.ssd_path).expanduser().absolute()
        try:
            make_ssd_folder(str(folder))
        except ConfigError as err:
            why = err.message.partition(": ")[2]
            text = f"ssd_path={settings.ssd_path!r}: {why}; name a folder that can be written to with --ssd-path"
            raise ConfigError(text, field="ssd_path") from None
    if settings.object_url:
        try:
            check_object_url(settings.object_url)
        except ConfigError as err:
            raise ConfigError(f"{err.message} (--object-url)", field="object_url") from None
        if importlib.util.find_spec("obstore") is None:
            why = f"needs the package obstore: {extras.install('object')}"
            raise ConfigError(
                f"object_url={settings.object_url!r}: {why}; or leave --object-url out", field="object_url"
            )
    if settings.warm_segment:
        _check_warm(settings)


def _check_warm(settings: MeshSettings) -> None:
    folder = Path(settings.warm_segment).absolute()
    wanted = settings.ranks * segment_mb(settings, available_bytes()) + settings.pool * settings.pool_memory_mb
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_folder(str(folder))
        kept = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        room = (shutil.disk_usage(folder).free + kept) // MIB
    except ConfigError as err:
        why = f"{err.message.partition(': ')[2]}; name another with --warm-segment"
    except OSError as err:
        why = f"{err.strerror}; name another with --warm-segment"
    else:
        if room >= wanted:
            return
        why = (
            f"has room for {room:,} MiB, host segments take {wanted:,} MiB: make that file system larger, or give less"
        )
        why += " with --memory-mb and --pool-memory-mb"
    raise ConfigError(f"warm_segment={settings.warm_segment!r}: {why}", field="warm_segment")

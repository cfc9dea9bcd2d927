"""The tables that `benchmarks.overload` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Told = dict[str, Any]
COLUMNS = (
    ("capacity", 9), ("mode", 10), ("offered/s", 10), ("goodput/s", 10), ("kept", 6), ("refused/s", 10),
    ("Retry-After p50, p99", 21), ("TTFT p50", 9), ("p99 ms", 8), ("failed", 7), ("for refused", 12), ("wasted", 7),
    ("client", 7), ("front", 6), ("mesh", 6),
)  # fmt: skip


def show(points: Sequence[Told], modes: Sequence[str]) -> None:
    """A line for each rate and mode, then what is left of the peak."""
    print("".join(f"{name:>{width}}" for name, width in COLUMNS))
    for point in points:
        for mode in modes:
            print(_line(point, mode, first=mode == modes[0]))
    print(
        "kept: of those not refused. for refused: prompt tokens computed for them. wasted: of all computed, for"
        "\nrequests that missed the SLO. client, front (gateway and conductor), mesh (all of it): cores in use.\n"
    )
    last = points[-1]["share"]
    for mode in modes:
        by_share = {point["share"]: point[mode]["goodput_per_s"] for point in points}
        peak = max(by_share.values())
        runs = ", ".join(f"{value:.1f}" for value in points[-1][mode]["goodput_by_run"])
        left = by_share[last] / peak if peak else 0.0
        at = max(by_share, key=lambda share: by_share[share])
        ratio = f"goodput({last:g}x) / peak = {by_share[last]:.1f} / {peak:.1f} (at {at:g}x) = {left:.0%}"
        print(f"{mode:>10}: {ratio}   runs at {last:g}x: {runs}")
    if failures := {text for point in points for mode in modes for text in point[mode]["failures"]}:
        print("FAILED:", "; ".join(sorted(failures)))


def _line(point: Told, mode: str, *, first: bool) -> str:
    told = point[mode]
    waits, ttft, cores = told["retry_after_s"], told["ttft_ms"], told["cores"]
    front = cores["gateway"] + cores["conductor"]
    words = (
        f"{point['share']:g}x" if first else "",
        mode,
        f"{told['offered_per_s']:.1f}",
        f"{told['goodput_per_s']:.1f}",
        f"{told['kept_of_taken']:.0%}",
        f"{told['refused_per_s']:.1f}",
        f"{waits[0]:.2f} s, {waits[1]:.2f} s" if waits else "-",
        f"{ttft[0]:.0f}" if ttft else "-",
        f"{ttft[2]:.0f}" if ttft else "-",
        str(told["failed"]),
        f"{told['tokens_for_refused']:,}",
        f"{told['wasted']:.0%}",
        f"{cores['client']:.2f}",
        f"{front:.2f}",
        f"{sum(value for name, value in cores.items() if name != 'client'):.2f}",
    )
    return "".join(f"{word:>{width}}" for word, (_, width) in zip(words, COLUMNS, strict=True))


def show_retries(told: Told) -> None:
    """What became of clients that come again when they were told to."""
    waits = told["waited_s"]
    kept, attempts = told["kept_slo_of_answered"], ", ".join(map(str, told["attempts"]))
    print(f"\nRetry-After honoured: {told['answered']} of {told['sent']} answered, {kept:.0%} of them within the SLO")
    print(f"attempts 1, 2, ...: {attempts} (mean {told['attempts_mean']:.1f})")
    if waits:
        print(f"first asked until answered, s: p50 {waits[0]:.1f}, p90 {waits[1]:.1f}, longest {waits[2]:.1f}")

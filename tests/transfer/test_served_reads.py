"""What peers READ of chosen ranges is counted, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.transfer.served_reads import MOST, ReadCount, ServedReads


def served(reads: ServedReads, offsets: Sequence[int], lengths: Sequence[int], start_ns: int, end_ns: int) -> None:
    reads.begin(offsets, lengths, start_ns)
    reads.end(offsets, lengths, end_ns)


def test_bytes_in_the_ranges_are_counted_once_whatever_pieces_they_are_read_in() -> None:
    reads = ServedReads()
    reads.watch("a", (100, 300, 200), (50, 100, 100))  # 100 to 150, and 200 to 400 in two pieces that touch
    reads.watch("b", (0,), (10,))
    served(reads, (90, 140), (20, 100), 5, 9)  # 10 of the first piece; 10 of its end and 40 of the next
    served(reads, (150,), (50,), 6, 20)  # between them
    served(reads, (390,), (500,), 7, 8)
    assert reads.unwatch("a", 30) == ReadCount(reads=2, nbytes=70, start_ns=5, end_ns=9)
    assert reads.unwatch("a", 30) is None
    assert reads.unwatch("b", 30) == ReadCount()


def test_what_is_being_sent_counts_as_its_reader_may_have_it() -> None:
    reads = ServedReads()
    reads.watch("a", (0,), (100,))
    served(reads, (0,), (60,), 5, 9)
    reads.begin((60,), (40,), 7)
    reads.end((200,), (1,), 11)  # another one
    assert reads.unwatch("a", 12) == ReadCount(reads=2, nbytes=100, start_ns=5, end_ns=12)
    reads.end((60,), (40,), 13)


def test_counts_are_bounded() -> None:
    reads = ServedReads()
    for name in range(MOST + 1):
        reads.watch(name, (0,), (1,))
    assert reads.unwatch(0, 1) is None and reads.unwatch(1, 1) is not None


def test_servers_look_at_one_flag_while_nothing_is_watched() -> None:
    reads = ServedReads()
    seen = [reads.watching]
    for name in ("a", "b"):
        reads.watch(name, (0,), (1,))
        seen.append(reads.watching)
    for name in ("a", "b"):
        reads.unwatch(name, 1)
        seen.append(reads.watching)
    assert seen == [False, True, True, True, False]

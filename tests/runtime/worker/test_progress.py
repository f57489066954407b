"""Who is missing from a collective, from what each rank says of itself."""

from collections.abc import Sequence

import msgspec
import pytest

from vcli.runtime.worker.progress import ProgressBoard, RankProgress, missing_from_collective

#: Two stages of two ranks.
GROUPS = [
    {"TP": (0, 1), "PP": (0, 2)},
    {"TP": (0, 1), "PP": (1, 3)},
    {"TP": (2, 3), "PP": (0, 2)},
    {"TP": (2, 3), "PP": (1, 3)},
]
#: Three stages of one rank.
STAGES = [{"PP": (0, 1, 2)}] * 3


def rank(number: int, operation: str = "", kind: str = "", *, entered: int = 5) -> RankProgress:
    return RankProgress(
        rank=number,
        num_entered=entered,
        operation=operation,
        kind=kind,
        seconds=1.0 if operation else 0.0,
    )


def recv(number: int, *, entered: int = 5) -> RankProgress:
    return rank(number, "recv", "PP", entered=entered)


def send(number: int, *, entered: int = 5) -> RankProgress:
    return rank(number, "send", "PP", entered=entered)


Groups = list[dict[str, tuple[int, ...]]]


def missing(ranks: Sequence[RankProgress | None], groups: Groups) -> dict[int, str]:
    """Who is blamed, for what."""
    return {
        each.rank: each.collective
        for each in missing_from_collective(ranks, groups)
        if each.progress is not None
    }


def unknown(ranks: Sequence[RankProgress | None], groups: Groups) -> dict[int, str]:
    """Of whom it is said that nobody knows."""
    return {
        each.rank: each.collective
        for each in missing_from_collective(ranks, groups)
        if each.progress is None
    }


def test_nobody_is_missing_where_nobody_waits() -> None:
    assert missing([rank(number) for number in range(4)], GROUPS) == {}


def test_stage_that_never_sends_is_what_the_next_stage_waits_for() -> None:
    ranks = [rank(0), rank(1), recv(2), recv(3)]
    assert missing(ranks, GROUPS) == {
        0: "recv of PP [0, 2]",
        1: "recv of PP [1, 3]",
    }


def test_stage_that_never_receives_is_what_the_stage_before_waits_for() -> None:
    ranks = [send(0), rank(1), rank(2)]
    assert missing(ranks, STAGES) == {1: "send of PP [0, 1, 2]"}


def test_sender_and_receiver_that_meet_miss_nobody_whatever_they_counted() -> None:
    ranks = [send(0, entered=90), recv(1, entered=3), rank(2)]
    assert missing(ranks, STAGES) == {}
    assert missing([send(0, entered=3), recv(1, entered=90)], STAGES) == {}


def test_of_stages_that_wait_for_each_other_the_one_outside_is_the_cause() -> None:
    # Rank 2 waits for rank 1, which itself waits for rank 0.
    ranks = [rank(0), recv(1), recv(2)]
    assert missing(ranks, STAGES) == {0: "recv of PP [0, 1, 2]"}


def test_stages_that_wait_in_a_ring_are_all_named() -> None:
    # Nobody is outside: rank 0 wants to send, and rank 1 to send as well.
    ranks = [send(0), send(1), send(2)]
    assert missing(ranks, STAGES) == {
        1: "send of PP [0, 1, 2]",
        2: "send of PP [0, 1, 2]",
    }


@pytest.mark.parametrize("waiting", [recv(0), send(2)], ids=["first-receives", "last-sends"])
def test_end_of_the_pipeline_waits_for_nobody(waiting: RankProgress) -> None:
    ranks = [rank(place) for place in range(3)]
    ranks[waiting.rank] = waiting
    assert missing(ranks, STAGES) == {}


def test_partner_that_waits_in_its_own_stage_points_to_whom_it_waits_for() -> None:
    # Rank 2 waits for rank 0, which waits in its stage for rank 1.
    ranks = [rank(0, "all_reduce", "TP", entered=6), rank(1), recv(2), rank(3)]
    assert missing(ranks, GROUPS) == {1: "all_reduce of TP [0, 1]"}


@pytest.mark.parametrize(("entered", "blamed"), [(4, {1: "all_reduce of TP [0, 1]"}), (5, {})])
def test_rank_that_has_entered_as_many_collectives_is_not_missing(
    entered: int, blamed: dict[int, str]
) -> None:
    ranks = [rank(0, "all_reduce", "TP"), rank(1, entered=entered), rank(2), rank(3)]
    assert missing(ranks, GROUPS) == blamed


def test_rank_of_which_nothing_is_known_is_never_blamed() -> None:
    ranks = [rank(0, "all_reduce", "TP"), None]
    assert missing(ranks, GROUPS[:2]) == {}
    assert unknown(ranks, GROUPS[:2]) == {1: "all_reduce of TP [0, 1]"}


def test_known_rank_is_blamed_beside_one_of_which_nothing_is_known() -> None:
    groups: Groups = [{"TP": (0, 1, 2)}] * 3
    ranks = [rank(0, "all_reduce", "TP"), None, rank(2, entered=4)]
    assert missing(ranks, groups) == {2: "all_reduce of TP [0, 1, 2]"}
    assert unknown(ranks, groups) == {1: "all_reduce of TP [0, 1, 2]"}


def test_rank_that_waits_itself_is_not_blamed_while_it_may_wait_for_an_unknown_one() -> None:
    # Rank 2 waits for rank 1, which waits for rank 0.
    ranks = [None, recv(1), recv(2)]
    assert missing(ranks, STAGES) == {}
    assert unknown(ranks, STAGES) == {0: "recv of PP [0, 1, 2]"}


def test_nobody_asks_for_an_unknown_rank_that_nobody_waits_for() -> None:
    assert missing_from_collective([rank(0), None, rank(2), None], GROUPS) == []


@pytest.mark.parametrize(("age_s", "is_blamed"), [(0.9, True), (1.0, True), (1.1, False)])
def test_rank_last_seen_before_the_wait_began_may_have_come_since(
    age_s: float, is_blamed: bool
) -> None:
    # The wait began 1 s ago.
    ranks = [rank(0, "all_reduce", "TP"), msgspec.structs.replace(rank(1, entered=4), age_s=age_s)]
    assert (1 in missing(ranks, GROUPS[:2])) == is_blamed
    assert (1 in unknown(ranks, GROUPS[:2])) != is_blamed


def test_rank_that_had_come_when_it_was_last_seen_is_not_missing_however_old_that_is() -> None:
    ranks = [rank(0, "all_reduce", "TP"), msgspec.structs.replace(rank(1), age_s=99.0)]
    assert missing_from_collective(ranks, GROUPS[:2]) == []


def test_one_long_wait_is_enough_to_know_who_is_late() -> None:
    groups: Groups = [{"TP": (0, 1, 2)}] * 3
    late = msgspec.structs.replace(rank(1, entered=4), age_s=0.5)
    just_come = msgspec.structs.replace(rank(0, "all_reduce", "TP"), seconds=0.1)
    ranks = [just_come, late, rank(2, "all_reduce", "TP")]
    assert missing(ranks, groups) == {1: "all_reduce of TP [0, 1, 2]"}
    assert unknown(ranks, groups) == {}


def test_line_of_a_rank_says_what_it_entered_and_left() -> None:
    board = ProgressBoard.create(2)
    line = board.line(1)
    line.enter("send", "PP")
    idle, sending = board.read(2)
    assert (idle.is_waiting, idle.num_entered) == (False, 0)
    assert (sending.rank, sending.operation, sending.kind) == (1, "send", "PP")
    assert sending.num_entered == 1
    line.leave()
    after = board.read(2)[1]
    assert (after.is_waiting, after.num_entered, after.seconds) == (False, 1, 0.0)

"""The line that one node prints for another."""

import pytest

from vcli.cli.node_session import command_for_node


@pytest.mark.parametrize(
    ("typed", "other"),
    [
        ("launch -n 2 -r 0 -tp 4 ./m", "vcli launch -n 2 -r 3 -tp 4 ./m"),
        ("launch -n 2 --node-rank=0 ./m", "vcli launch -n 2 --node-rank=3 ./m"),
        ("launch -n 2 --node_rank 0 ./m", "vcli launch -n 2 --node_rank 3 ./m"),
        ("launch -n 2 -r0 ./m", "vcli launch -n 2 -r3 ./m"),
        ("serve --nnodes 2 ./m", "vcli serve -r 3 --nnodes 2 ./m"),
    ],
)
def test_it_is_the_own_line_with_the_rank_of_the_other(typed: str, other: str) -> None:
    assert command_for_node(typed.split(), 3) == other


def test_words_that_a_shell_would_split_are_quoted() -> None:
    assert command_for_node(["launch", "-r", "0", "my model"], 1) == "vcli launch -r 1 'my model'"

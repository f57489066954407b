"""`python -m vcli.cli`."""

from vcli.cli.entry import run

run()

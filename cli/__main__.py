"""`python -m vcli.cli`."""

from vcli.cli.main import run

run()

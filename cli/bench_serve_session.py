"""One `vcli bench serve`: run the load, print and save what is known."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vcli.cli.doctor_page import PageFile
from vcli.cli.environment import Environment
from vcli.cli.output import Output
from vcli.cli.views.bench_serve import failures_text, request_rows, serve_document, serve_table
from vcli.runtime.bench.http_client import ServerAddress
from vcli.runtime.bench.serve import ServeBenchResult, run_serve_bench
from vcli.runtime.bench.serve_spec import ServeBenchSpec
from vcli.runtime.bench.stats import host_facts
from vcli.topology import ConfigError, ExitStatus, UnfitError, VcliError

SCHEMA = "vcli.bench-serve/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServeSession:
    """One run of the command."""

    environment: Environment
    output: Output
    spec: ServeBenchSpec
    address: ServerAddress
    model: str | None
    save: str | None

    def run(self) -> ExitStatus:
        """Measure and print; blocks.

        Raises:
            ConfigError: what was typed is wrong, or the server refuses it.
            UnfitError: the server cannot answer the first request.
        """
        file = None
        if self.save is not None:
            file = PageFile.at(self.save, self.environment.cwd, "--save results.json")
        key = self.environment.environ.get("OPENAI_API_KEY", "")
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("OPENAI_API_KEY has characters that no key has", hint="unset it")
        host = host_facts()
        result = run_serve_bench(
            self.spec,
            self.address,
            model=self.model,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            note=self.output.note,
        )
        document = serve_document(host, self.address, result)
        problems = [self._problem(result)]
        status = result.status
        if file is not None:
            try:
                self._write(file, document, result)
            except VcliError as error:
                problems.append(error)
                status = status or error.exit_status
        if self.output.json_mode:
            self.output.document(SCHEMA, document, status)
        else:
            width = self.output.width
            self.output.result(serve_table(host, self.address, result, width=width))
        for problem in problems:
            if problem is not None:
                self.output.note_error(problem)
        return status

    def _write(self, file: PageFile, document: Mapping[str, Any], result: ServeBenchResult) -> None:
        whole = {"schema": SCHEMA, "exit_code": int(result.status), **document}
        rows = request_rows(result)
        file.write(json.dumps({**whole, "requests": rows}, indent=2) + "\n")

    def _problem(self, result: ServeBenchResult) -> VcliError | None:
        """The one message about requests that failed."""
        if result.status in (ExitStatus.INTERRUPTED, ExitStatus.TERMINATED):
            self.output.note("stopped: this is what is known")
        if not result.failures:
            return None
        if result.is_server_gone:
            left = f" with {result.num_unsent} requests left" if result.num_unsent else ""
            return UnfitError(
                f"the server went away{left}: {failures_text(result)}",
                hint="look at the server's own output for the cause",
            )
        return UnfitError(failures_text(result))

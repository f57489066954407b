"""From what was typed to what is shown: facts, plan, judgement, one of the views."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vcli.cli.build import check_range, resolve_dtype
from vcli.cli.environment import Environment
from vcli.cli.output import Output
from vcli.cli.topo_facts import (
    FactsRequest,
    TopoFacts,
    choose_own_devices,
    collect_facts,
    find_facts,
    save_facts,
)
from vcli.cli.topo_model import TopoModel, read_topo_model
from vcli.cli.topo_report import TopoReport, make_report, report_to_json
from vcli.topology import ConfigError, ParallelConfig
from vcli.topology.estimate import Workload
from vcli.topology.sizes import ParallelSizes

FORMATS: Final = ("text", "csv", "dot", "mermaid", "svg", "html")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopoShow:
    """Which view; at most one besides the format."""

    as_json: bool
    format_name: str
    rank: int | None
    group: str | None
    explain: str | None
    is_suggesting: bool
    compared: ParallelSizes | None
    save_facts: str | None
    prints_commands: bool
    hosts: str | None
    hostfile: str | None

    def __post_init__(self) -> None:
        if self.format_name not in FORMATS:
            raise ConfigError(
                f"--format {self.format_name!r} is unknown", hint=f"one of {', '.join(FORMATS)}"
            )
        views = {
            "--rank": self.rank is not None,
            "--group": self.group is not None,
            "--explain": self.explain is not None,
            "--suggest": self.is_suggesting,
            "--compare": self.compared is not None,
            "--print-commands": self.prints_commands,
        }
        asked = [flag for flag, is_asked in views.items() if is_asked]
        if self.format_name != "text":
            asked.append(f"--format {self.format_name}")
            if self.as_json:
                asked.append("--json")
        if len(asked) > 1:
            raise ConfigError(
                f"{' and '.join(asked)} are views of their own", hint="give one of them"
            )
        if (self.hosts or self.hostfile) and not self.prints_commands:
            raise ConfigError(
                "--hosts and --hostfile say whom --print-commands is for",
                hint="add --print-commands",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopoSession:
    """One `vcli topo`. `text_view` turns a plan into the text for people."""

    environment: Environment
    sizes: ParallelSizes
    model_name: str | None
    dtype: str
    attention_backend: str
    max_model_len: int | None
    machines: FactsRequest
    workload: Workload
    text_view: Callable[..., str]

    def show(self, wanted: TopoShow) -> None:
        """Print the one view that is wanted.

        Raises:
            VcliError: what was typed or named is wrong.
        """
        self._check_workload()
        output = Output(self.environment, json_mode=wanted.as_json)
        model = self._read_model()
        sizes = self.sizes
        if model is not None:
            sizes = replace(sizes, is_moe=model.spec.is_moe)
        if wanted.save_facts is not None:
            self._save(Path(self.environment.cwd, wanted.save_facts), output)
        if wanted.is_suggesting:
            self._suggest(sizes, model, output)
            return
        config = ParallelConfig.checked(sizes)
        if wanted.explain is not None:
            self._explain(wanted.explain, config, output)
        elif wanted.prints_commands:
            self._print_commands(wanted, config, output)
        else:
            self._show_plan(wanted, config, model, output)

    def _show_plan(
        self,
        wanted: TopoShow,
        config: ParallelConfig,
        model: TopoModel | None,
        output: Output,
    ) -> None:
        facts = self._facts(config)
        report = self._report(config, facts, model)
        if wanted.compared is not None:
            other = ParallelConfig.checked(replace(wanted.compared, is_moe=config.is_moe))
            self._compare(report, self._report(other, facts, model), output)
        elif wanted.rank is not None or wanted.group is not None:
            self._select(wanted, report, output)
        elif wanted.as_json:
            document = report_to_json(report)
            output.document(document.pop("schema"), document)
        else:
            output.result(self._formatted(wanted.format_name, report, output))

    def _formatted(self, name: str, report: TopoReport, output: Output) -> str:
        from vcli.cli.views.costs import cost_sections

        if name in ("text", "html"):
            width = output.width
            text = self.text_view(
                report.plan,
                width=width,
                costs=cost_sections(report, width=width),
                warnings=report.warnings,
            )
            if name == "text":
                return text
            from vcli.cli.views.page import html_view

            return html_view(report, text)
        if name == "svg":
            from vcli.cli.views.picture import svg_view

            return svg_view(report)
        from vcli.cli.views.formats import csv_view, dot_view, mermaid_view

        views = {"csv": csv_view, "dot": dot_view, "mermaid": mermaid_view}
        return views[name](report.plan)

    def _select(self, wanted: TopoShow, report: TopoReport, output: Output) -> None:
        from vcli.cli.views.selection import find_rank, group_view, rank_to_json, rank_view
        from vcli.topology.explain import parse_kind

        document: dict[str, Any] = {}
        if wanted.rank is not None:
            rank = find_rank(report.plan, wanted.rank)
            document = {"rank": rank_to_json(report, rank)}
            text = rank_view(report, rank, width=output.width)
        else:
            kind = parse_kind(wanted.group or "")
            text = group_view(report.plan, kind, width=output.width)
            groups = report.plan.groups[kind.value]
            document = {"kind": kind.value, "groups": [list(ranks) for ranks in groups]}
        if wanted.as_json:
            output.document("vcli.topo.selection/1", document)
        else:
            output.result(text)

    def _compare(self, first: TopoReport, second: TopoReport, output: Output) -> None:
        from vcli.cli.views.alternatives import compare_rows, compare_view

        if output.json_mode:
            rows = [
                {"name": name, "first": ours, "second": theirs}
                for name, ours, theirs in compare_rows(first, second)
            ]
            plans = [report_to_json(first), report_to_json(second)]
            output.document("vcli.topo.compare/1", {"rows": rows, "plans": plans})
        else:
            output.result(compare_view(first, second, width=output.width))

    def _suggest(self, sizes: ParallelSizes, model: TopoModel | None, output: Output) -> None:
        from vcli.cli.views.alternatives import suggest_view, suggestions_to_json
        from vcli.topology.links import hardware_of
        from vcli.topology.suggest import suggest_layouts

        if model is None:
            raise ConfigError(
                "--suggest needs a model: its sizes decide", hint="vcli topo MODEL --suggest"
            )
        facts = self._facts(None)
        if facts.device_type != "cuda" or not facts.host.gpus:
            raise ConfigError(
                "--suggest ranks layouts of GPUs, none is seen here",
                hint="--gpus 8 --gpu h100 says which to plan for",
            )
        dtype = resolve_dtype(self.dtype, model.spec)
        hardware = hardware_of(facts.host, "cuda", facts.link)
        num_gpus = len(facts.host.gpus) * sizes.nnodes
        found = suggest_layouts(
            sizes,
            model.spec,
            num_gpus=num_gpus,
            hardware=hardware,
            host=facts.host,
            workload=self.workload,
            dtype=dtype,
            device_type="cuda",
        )
        if output.json_mode:
            output.document("vcli.topo.suggest/1", suggestions_to_json(found))
            return
        title = (
            f"{model.name}, {dtype}, on {num_gpus} GPUs, {sizes.nnodes} node(s): "
            f"{hardware.describe()}; {self.workload.num_requests} requests of "
            f"{self.workload.context_tokens:,} tokens"
        )
        output.result(suggest_view(found, title=title, width=output.width))

    def _explain(self, kind: str, config: ParallelConfig, output: Output) -> None:
        from vcli.cli.views.explain import explain_view, explanation_to_json
        from vcli.topology.explain import explain_group, parse_kind

        explained = explain_group(parse_kind(kind), config)
        if output.json_mode:
            output.document("vcli.topo.explain/1", explanation_to_json(explained))
        else:
            output.result(explain_view(explained, width=output.width))

    def _print_commands(self, wanted: TopoShow, config: ParallelConfig, output: Output) -> None:
        from vcli.cli.hosts import find_hosts
        from vcli.cli.views.commands import commands_to_json, commands_view
        from vcli.topology.commands import node_commands

        found = find_hosts(
            hosts=wanted.hosts,
            hostfile=wanted.hostfile,
            environ=self.environment.environ,
            cwd=self.environment.cwd,
            num_nodes=config.num_hosts,
            master_addr=config.master_addr,
        )
        commands = node_commands(config, found.hosts, model=self.model_name)
        if output.json_mode:
            output.document("vcli.topo.commands/1", commands_to_json(commands, found))
        else:
            output.result(commands_view(commands, found))

    def _read_model(self) -> TopoModel | None:
        if not self.model_name:
            return None
        environment = self.environment
        return read_topo_model(self.model_name, environment.cwd, environ=environment.environ)

    def _facts(self, config: ParallelConfig | None) -> TopoFacts:
        num_ranks = config.local_world_size * config.node_data_parallel_size if config else 8
        facts = find_facts(self.machines, self.environment, num_ranks=num_ranks)
        return choose_own_devices(facts, self.machines, self.environment, parallel=config)

    def _report(
        self, config: ParallelConfig, facts: TopoFacts, model: TopoModel | None
    ) -> TopoReport:
        return make_report(
            config,
            facts,
            model=model,
            dtype=resolve_dtype(self.dtype, model.spec) if model else None,
            attention_backend=self.attention_backend,
            workload=self.workload,
            max_model_len=self.max_model_len,
        )

    def _save(self, path: Path, output: Output) -> None:
        host, problem = collect_facts(self.environment)
        save_facts(path, host)
        output.note(f"facts about {host.hostname} saved: {path}")
        if problem:
            output.note(f"! {problem}")

    def _check_workload(self) -> None:
        work = self.workload
        for flag, value in (
            ("--batch", work.num_requests),
            ("--context", work.context_tokens),
            ("--block-size", work.block_size),
            ("--max-num-seqs", work.max_num_seqs),
            ("--max-num-batched-tokens", work.max_num_batched_tokens),
            ("--max-model-len", 1 if self.max_model_len is None else self.max_model_len),
        ):
            check_range(flag, value)
        if not 0 < work.utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization {work.utilization:g} must be above 0 and at most 1",
                hint="--gpu-memory-utilization 0.9",
            )

"""The command line: `jointcv paper run | table | figure | report`."""

import argparse
from pathlib import Path

BUDGETS = ("smoke", "short", "paper")


def main(arguments: list[str] | None = None) -> None:
    """The entry point."""
    options = _parser().parse_args(arguments)
    options.call(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jointcv", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    paper = commands.add_parser("paper", help="the experiments of the paper")
    actions = paper.add_subparsers(required=True, metavar="action")

    run = actions.add_parser("run", help="run a task; what has run already is not run again")
    run.add_argument("task", nargs="+", help="a task of the paper, dropout, or all")
    run.add_argument("--budget", choices=BUDGETS, default="short")
    run.add_argument("--estimators", help="some of them, separated by commas")
    run.add_argument("--stages", help="some of sweep, timing, variance, table1, nuts; all by default")
    run.set_defaults(call=_run)

    table = actions.add_parser("table", help="print a table of the paper")
    table.add_argument("number", type=int)
    table.set_defaults(call=_table)

    figure = actions.add_parser("figure", help="draw a figure of the paper")
    figure.add_argument("name")
    figure.set_defaults(call=_figure)

    report = actions.add_parser("report", help="write one HTML page with everything")
    report.set_defaults(call=_report)

    for action in (run, table, figure, report):
        action.add_argument("--results", type=Path, default=Path("results"), help="folder of the results")
    figure.add_argument("--output", type=Path, help="file; <name>.png by default")
    report.add_argument("--output", type=Path, default=Path("report.html"))
    return parser


def _run(options) -> None:
    from jointcv.paper.run import TASK_NAMES, run_task

    names = TASK_NAMES if options.task == ["all"] else tuple(options.task)
    stages = tuple(options.stages.split(",")) if options.stages else None
    estimators = tuple(options.estimators.split(",")) if options.estimators else None
    for name in names:
        run_task(name, options.budget, options.results, estimators=estimators, stages=stages)


def _table(options) -> None:
    from jointcv.paper.tables import table

    print(table(options.number, options.results))


def _figure(options) -> None:
    from jointcv.paper.figures import figure

    path = options.output or Path(f"{options.name}.png")
    figure(options.name, options.results).savefig(path)
    print(path)


def _report(options) -> None:
    from jointcv.paper.report import report

    options.output.write_text(report(options.results))
    print(options.output)


if __name__ == "__main__":
    main()

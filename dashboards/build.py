"""Build dashboards/slo.json, the Grafana dashboard of the promises: ``python -m dashboards.build``.

The JSON is committed, so that Grafana needs nothing of this. The metrics are declared in deployments/metrics.py; Ray
puts ``ray_`` before their names.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import DatasourceVariable, QueryVariable, ThresholdsConfig
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, Threshold, ThresholdsMode, VariableRefresh

from deployments.durable_file import write_durably

TARGET = Path(__file__).resolve().parent / "slo.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WINDOW = "$__rate_interval"
OF_SERVICE = 'service=~"$service"'


def kept(kind: str) -> str:
    """Share of requests per service that kept the promise ``kind``; no value, rather than NaN, while nothing ends."""

    def rate(more: str) -> str:
        return f'sum by (service) (rate(ray_halo_slo_requests_total{{{OF_SERVICE},kind="{kind}"{more}}}[{WINDOW}]))'

    met = rate(',result="met"')
    missed_all = f"{rate('')} * 0"  # a service that met nothing has no "met" series yet
    return f"({met} or {missed_all}) / ({rate('')} > 0)"


def quantile(q: float, metric: str) -> str:
    """The ``q`` quantile per service of a histogram."""
    buckets = f"rate(ray_{metric}_bucket{{{OF_SERVICE}}}[{WINDOW}])"
    return f"histogram_quantile({q}, sum by (le, service) ({buckets}))"


def per_second(metric: str, *labels: str) -> str:
    """Rate of a counter by labels."""
    return f"sum by ({', '.join(labels)}) (rate(ray_{metric}{{{OF_SERVICE}}}[{WINDOW}]))"


def query(expression: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expression).legend_format(legend).datasource(SOURCE)


def share(title: str, description: str, kind: str) -> stat.Panel:
    """Attainment now, one number per service: red below 95 %, green from 99 %."""
    steps = [Threshold(None, "red"), Threshold(0.95, "orange"), Threshold(0.99, "green")]
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit("percentunit")
        .decimals(1)
        .thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value("nothing ended")
        .height(6)
        .span(8)
        .with_target(query(kept(kind), "{{service}}"))
    )


def lines(title: str, description: str, unit: str, *queries: prometheus.Dataquery) -> timeseries.Panel:
    """A time series panel, two in a row."""
    legend = VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .legend(legend)
        .height(8)
        .span(12)
    )
    for each in queries:
        panel = panel.with_target(each)
    return panel


def slo_dashboard() -> dashboard.Dashboard:
    """Attainment now, its course, latencies, load."""
    service = (
        QueryVariable("service")
        .label("Service")
        .query("label_values(ray_halo_requests_total, service)")
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
    )
    return (
        dashboard.Dashboard("HALO Serve: promises")
        .uid("halo-slo")
        .tags(["halo"])
        .refresh("10s")
        .time("now-1h", "now")
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(service)
        .with_panel(share("TTFT kept", "Streamed requests whose first token was released within TTFT.", "ttft"))
        .with_panel(share("TBT kept", "Streamed requests in which no gap between tokens exceeded TBT.", "tbt"))
        .with_panel(
            share("Deadlines kept", "Requests whose every token i was out by arrival + TTFT + i x TBT.", "deadlines")
        )
        .with_panel(lines("TTFT kept over time", "As above.", "percentunit", query(kept("ttft"), "{{service}}")).max(1))
        .with_panel(lines("TBT kept over time", "As above.", "percentunit", query(kept("tbt"), "{{service}}")).max(1))
        .with_panel(
            lines(
                "Time to first token, p99",
                "From arrival at the gateway to release; interpolated between histogram edges.",
                "s",
                query(quantile(0.99, "halo_ttft_seconds"), "{{service}}"),
            )
        )
        .with_panel(
            lines(
                "Time between tokens, p99",
                "Between released tokens; interpolated between histogram edges.",
                "s",
                query(quantile(0.99, "halo_tbt_seconds"), "{{service}}"),
            )
        )
        .with_panel(
            lines(
                "Requests a second by outcome",
                "How requests ended.",
                "reqps",
                query(per_second("halo_requests_total", "service", "outcome"), "{{service}} {{outcome}}"),
            )
        )
        .with_panel(
            lines(
                "Tokens a second",
                "Tokens released to clients.",
                "short",
                query(per_second("halo_tokens_total", "service"), "{{service}}"),
            )
        )
        .with_panel(
            lines(
                "Wait in admission, p99",
                "How long granted requests waited for a replica.",
                "s",
                query(quantile(0.99, "halo_queue_seconds"), "{{service}}"),
            )
        )
        .with_panel(
            lines(
                "Turned away, and tokens held",
                "Requests shed by reason; deliveries that the pacers hold back.",
                "short",
                query(per_second("halo_shed_total", "service", "reason"), "shed {{service}} {{reason}}"),
                query("sum(ray_halo_held_tokens)", "held"),
            )
        )
    )


def rendered() -> str:
    """The dashboard as JSON text."""
    return JSONEncoder(sort_keys=True, indent=2).encode(slo_dashboard().build()) + "\n"


def main() -> int:
    write_durably(TARGET, rendered(), 0o644)
    return 0


if __name__ == "__main__":
    sys.exit(main())

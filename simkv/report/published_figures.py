"""Comparison of published metrics with simulated ones."""

from __future__ import annotations

from dataclasses import dataclass

from simkv.core.figure_registry import figure
from simkv.metrics.run_metrics import e2e
from simkv.metrics.run_result import RunResult


@dataclass(frozen=True)
class PublishedComparison:
    """Published and simulated value of a metric.

    ``bound`` is true if the published value is a lower bound. ``error`` is (simulated - published)
    / published, or None if undefined.
    """

    variant: str
    figure: str
    published: float
    simulated: float | None
    bound: bool = False

    @property
    def error(self) -> float | None:
        if self.bound or self.simulated is None or not self.published:
            return None
        return (self.simulated - self.published) / self.published

    @property
    def holds(self) -> bool | None:
        """Whether the simulated value is at least the bound; None if the published value is not a
        bound.
        """
        if not self.bound:
            return None
        return self.simulated is not None and self.simulated >= self.published

    @property
    def told(self) -> str:
        """Published value as text."""
        return f"≥ {self.published:g}" if self.bound else f"{self.published:.10g}"

    @property
    def verdict(self) -> str:
        """Result of the comparison as text: the error, or whether the bound holds."""
        if self.holds is not None:
            return "holds" if self.holds else "does not hold"
        if self.error is not None:
            return f"{100 * self.error:+.2f} %"
        return "equal" if self.simulated == self.published else "differs"


def compare_published(results: dict[str, RunResult]) -> list[PublishedComparison]:
    """Return every published metric of the scenario with its simulated value."""
    rows: list[PublishedComparison] = []
    for variant, result in results.items():
        published = result.scenario.published.get(variant)
        if published is None:
            continue
        for name, value in published.figures.items():
            rows.append(PublishedComparison(variant, name, value, figure(result.summary, name)))
        for name, value in published.at_least.items():
            rows.append(
                PublishedComparison(variant, name, value, figure(result.summary, name), bound=True)
            )
        for i, value in published.e2e_s.items():
            life = result.record.requests.get(i)
            rows.append(
                PublishedComparison(
                    variant, f"request {i} e2e_s", value, e2e(life) if life else None
                )
            )
        for i, value in published.finish_s.items():
            life = result.record.requests.get(i)
            finish = life.last_token if life else None
            rows.append(PublishedComparison(variant, f"request {i} finish_s", value, finish))
    return rows

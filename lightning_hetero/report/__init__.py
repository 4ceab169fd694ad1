"""A plan, a trace or a recorded run as one HTML page, and as fragments for notebooks."""

from lightning_hetero.report.content import PageContent
from lightning_hetero.report.notebook import plan_fragment, trace_fragment
from lightning_hetero.report.page import page
from lightning_hetero.report.steps import measured, predicted

__all__ = ["PageContent", "measured", "page", "plan_fragment", "predicted", "trace_fragment"]

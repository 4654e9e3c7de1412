"""Series of samples as inputs, such as sound and vibration: cut into windows, each of which is asked."""

from edge_runtime.answers import AnswerLayout
from edge_runtime.series import values
from edge_runtime.steps import StepsDeclaration

STEPS = StepsDeclaration(
    "series",
    sources=("series",),
    table="edge_runtime.series.series_steps:SeriesSteps",
    read="edge_runtime.series.declared_series:declared_series",
    reader="edge_runtime.series.series_input:series_input",
    mark="rate",
)

WINDOWS = AnswerLayout(
    "windows",
    "",
    read=values.read_windows,
    to_json=values.windows_to_json,
    from_json=values.windows_from_json,
    lines=values.window_lines,
    short=values.short_windows,
    count=values.window_count,
)
"""Of the output WINDOW_TIMES: when each window began and ended, and its answer."""

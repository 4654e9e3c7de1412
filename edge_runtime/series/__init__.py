"""Series of samples as inputs, such as sound and vibration: cut into windows, each of which is asked."""

from edge_runtime.steps import StepsDeclaration

STEPS = StepsDeclaration(
    "series",
    sources=("series",),
    table="edge_runtime.series.series_steps:SeriesSteps",
    read="edge_runtime.series.declared_series:declared_series",
    reader="edge_runtime.series.series_input:series_input",
    mark="rate",
)

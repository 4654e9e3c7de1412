"""A loaded model asked with pictures, and answering as a person wants it: its declared steps, run in its host.

Owns: pictures to tensors, and outputs to the arrays of answers.py. Thread: any runner of the host.
"""

from __future__ import annotations

import numpy as np

from edge_runtime.answers import PICTURE_SIZE
from edge_runtime.backends.answer_steps import AnswerSteps
from edge_runtime.backends.base import Instance
from edge_runtime.backends.picture_fit import Placed
from edge_runtime.backends.picture_input import PictureInput, picture_input
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.steps import Form, Given, ModelSteps
from edge_runtime.tensors import Array, Tensors


def make_forms(instance: Instance, steps: ModelSteps, threads: int) -> list[StepsInstance]:
    """The forms in which a model with these steps can be asked, beside its own. Raises LoadFailed: they do not fit."""
    picture = picture_input(instance.spec, steps, threads, instance.concurrency)
    answers = AnswerSteps(instance, steps, picture.sides if picture is not None else None)
    given: list[Given] = ["tensor"]
    if picture is not None:
        given += picture.given
    forms = [Form(each, answers) for each in given for answers in (True, False)]
    return [StepsInstance(instance, picture, answers, form) for form in forms if form != Form("tensor", answers=False)]


class StepsInstance:
    """One form of a model. spec: what goes in and out in this form."""

    def __init__(self, instance: Instance, picture: PictureInput | None, answers: AnswerSteps, form: Form) -> None:
        self.form = form
        self._instance = instance
        self._picture = picture if form.given != "tensor" else None
        inputs = tuple(
            spec if self._picture is None or spec.name != self._picture.name else self._picture.given_spec(form.given)
            for spec in instance.spec.inputs
        )
        self._answers = answers if form.answers else None
        outputs = instance.spec.outputs
        if self._answers is not None:
            outputs = self._answers.specs
            if self._picture is not None:
                outputs += (TensorSpec(PICTURE_SIZE, "INT64", (DYNAMIC, 2)),)
        self.spec = ModelSpec(inputs, outputs, instance.spec.max_rows)

    def run(self, inputs: Tensors) -> list[Array]:
        """Run once. Raises UnreadablePicture, which is the caller's fault; RunFailed: the model failed."""
        tensors = dict(inputs)
        places: list[Placed] = []
        if self._picture is not None:
            name = self._picture.name
            tensors[name], places = self._picture.rows(self.form.given, inputs[name])
        if self._answers is None:
            return self._instance.run(tensors)
        results = dict(zip(self._answers.needs, self._instance.run(tensors, self._answers.needs), strict=True))
        answers = self._answers.make(results, tensors, places)
        if self._picture is not None:
            answers.append(np.array([(each.source_width, each.source_height) for each in places], np.int64))
        return answers

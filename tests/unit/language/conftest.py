"""A random model that writes under guides: it takes any way that a grammar allows, so it is the best adversary."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from edge_runtime.backends.openvino_genai.trials import Trials, structured
from edge_runtime.language.calls import AnswerShape, Guide
from tests.models.language_models import tiny_model


class Writer:
    """Writes answers by the library's pipeline, as an engine does, one after the other."""

    def __init__(self, library: ModuleType, pipeline: Any, trials: Trials) -> None:
        self.library = library
        self.pipeline = pipeline
        self.trials = trials
        self.tokenizer = pipeline.get_tokenizer()
        self._requests = 0

    def begin(self, guide: Guide | None, seed: int = 0, max_tokens: int = 300) -> Any:
        """Begin an answer, without a trial of its guide."""
        config = self.library.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.rng_seed, config.top_k = max_tokens, True, seed, 1 << 62
        config.apply_chat_template = False
        if guide is not None:
            config.structured_output_config = structured(self.library, guide)
        self._requests += 1
        return self.pipeline.add_request(self._requests, "Küche", config)

    def end(self, handle: Any) -> tuple[str, str]:
        """Return the text of an answer, and "stop" or "length"."""
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        (output,) = handle.read_all()
        return self.tokenizer.decode(output.generated_ids), output.finish_reason.name.lower()

    def write(self, wanted: AnswerShape, seed: int = 0, max_tokens: int = 300) -> tuple[str, str]:
        """Try what an answer must be, and write it."""
        return self.end(self.begin(self.trials.begin(wanted).result(), seed, max_tokens))


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writer]:
    """A random model that writes under guides; skips where the extra llm is not installed."""
    library = pytest.importorskip("openvino_genai", reason="the extra llm is not installed")
    folder = tiny_model(tmp_path_factory.mktemp("language") / "1", context=4096)
    schedule = library.SchedulerConfig()
    schedule.num_kv_blocks = 256
    pipeline = library.ContinuousBatchingPipeline(str(folder), schedule, "CPU", {"INFERENCE_NUM_THREADS": 1})
    trials = Trials(library, pipeline.get_tokenizer(), folder)
    yield Writer(library, pipeline, trials)
    trials.close()

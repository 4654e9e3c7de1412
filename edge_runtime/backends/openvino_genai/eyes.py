"""Pictures for a vision-language model: opened beside the answers under way, and what each takes of a prompt.

Owns: a thread for each chat whose pictures are opened, which lives as long as that, one at a time; and how many tokens
a picture of which size was. The library makes tokens of pixels itself, with the request that brings them. Thread: the
writer's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Lock, Thread

from edge_runtime.errors import UnreadablePicture
from edge_runtime.language.pictures import LONGEST_SIDE, MOST_PIXELS, SentPicture
from edge_runtime.tensors import Array

LANGUAGE_MODEL = "openvino_language_model.xml"
"""The graph of a vision-language model that writes, in place of `openvino_model.xml`."""

NEEDED_GRAPHS = ("openvino_text_embeddings_model.xml", "openvino_vision_embeddings_model.xml")
OTHER_GRAPHS = (
    "openvino_vision_embeddings_merger_model.xml",
    "openvino_vision_embeddings_pos_model.xml",
    "openvino_vision_projection_model.xml",
    "openvino_vision_resampler_model.xml",
    "openvino_resampler_model.xml",
    "openvino_multi_modal_projector_model.xml",
    "openvino_text_embeddings_per_layer_model.xml",
)
"""Graphs beside it: of all families, and of some. Source: openvino.genai, src/cpp/src/visual_language."""

MARK, MARKS = "<ov_genai_image_{}>", "<ov_genai_"
"""The library's text for the place of a picture, of every family; how all of its marks begin."""

_KEPT = 64
"""Sizes of pictures whose tokens are remembered: two a camera."""

_FADES = 0.9
"""Of the longest time that a picture took, with each that took less: the first has the library's own start in it."""


class Eyes:
    """Opens pictures, and knows what they take. tokens: of a picture, the most that was seen; seconds: of late."""

    def __init__(self) -> None:
        """Raises LoadFailed: what opens pictures is not installed."""
        from edge_runtime.pictures.pictures import check_installed  # only where a model sees

        check_installed()
        self.tokens = 0
        self.seconds = 0.0
        self._known: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._one_at_a_time = Lock()
        self._threads: list[Thread] = []

    def open(self, pictures: Sequence[SentPicture]) -> Future[list[Array]]:
        """Open the pictures of a chat; the future raises DecodeFailed: what is wrong with which."""
        opening: Future[list[Array]] = Future()
        self._threads = [each for each in self._threads if each.is_alive()]
        thread = Thread(target=self._run, args=(tuple(pictures), opening), name="picture-opening", daemon=True)
        self._threads.append(thread)
        thread.start()
        return opening

    def count(self, shapes: Sequence[tuple[int, ...]]) -> int:
        """Return about how many tokens pictures take: of a size that was not seen yet, as many as one at most."""
        return sum(self._known.get(each, self.tokens) for each in shapes)

    def learn(self, shapes: Sequence[tuple[int, ...]], tokens: int) -> None:
        """Note how many tokens pictures were; of several sizes nothing, as which took how many is not told."""
        if len(set(shapes)) != 1:
            return
        one = -(-tokens // len(shapes))
        self.tokens = max(self.tokens, one)
        self._known[shapes[0]] = one
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def observe(self, seconds: float) -> None:
        """Note how long making tokens of one picture took."""
        self.seconds = max(seconds, self.seconds * _FADES)

    def close(self) -> None:
        """Wait for the pictures that are opened."""
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _run(self, pictures: Sequence[SentPicture], opening: Future[list[Array]]) -> None:
        with self._one_at_a_time:
            if not opening.set_running_or_notify_cancel():
                return
            try:
                opening.set_result(_open(pictures))
            except Exception as error:  # noqa: BLE001  the caller's to tell
                opening.set_exception(error)


def _open(pictures: Sequence[SentPicture]) -> list[Array]:
    from edge_runtime.pictures.pictures import small_picture

    opened = []
    for each in pictures:
        try:
            opened.append(small_picture(each.data(), LONGEST_SIDE, MOST_PIXELS))
        except UnreadablePicture as error:
            raise UnreadablePicture(f"{each.where}: {error.message}") from None
    return opened

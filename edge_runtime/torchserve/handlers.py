"""The modules that a handler of TorchServe's imports, `ts` and its modules: TorchServe's interface, over our hosts.

Owns: the context, the base handlers and the small functions that handlers use, written anew after TorchServe's
documentation. `offer_modules` puts them among a host's modules by TorchServe's names; nothing else imports them so.
model.py runs the handler. Without torch they work on numpy arrays; a handler that imports torch gets
tensors. Thread: a host's.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import itertools
import json
import logging
import re
import string
import sys
import types
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.pictures.pictures import bounded_picture

log = logging.getLogger(__name__)

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet, by which torchvision's models are trained."""

PICTURE_SIDE, SHORTER_SIDE = 224, 256

WITHOUT_TORCH = (
    "install torch beside the daemon, or give the network in a form that is served: import it with "
    "--shapes NAME=-1,3,224,224 (TorchScript), or put an .onnx or .pt2 into the archive"
)


class PredictionException(Exception):
    """An error that a handler answers its request with."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


class HandlerMetrics:
    """`context.metrics`: takes what handlers measure, and keeps none of it; the daemon counts requests and times."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self  # noqa: ARG005 (any of TorchServe's ways to measure)


class RequestProcessor:
    """One request's headers, and the status and headers of its answer."""

    def __init__(self, headers: Mapping[str, Any]) -> None:
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.status = 200
        self.response_headers: dict[str, str] = {}

    def get_request_property(self, key: str) -> Any:
        """A request's header, whatever its case; None where it has none."""
        return self.headers.get(key.lower())

    def get_request_properties(self) -> dict[str, Any]:
        """All headers of the request, and of each part of a form, by the part's name."""
        return dict(self.headers)

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        """Set the status of the answer."""
        del reason_phrase
        self.status = int(code)

    def add_response_property(self, key: str, value: str) -> None:
        """Set a header of the answer."""
        self.response_headers[str(key).lower()] = str(value)


class HandlerContext:
    """A handler's view of its model, its server and the requests of the batch that runs.

    network: calls the served model that the archive's weights became; None where the handler loads them itself.
    """

    def __init__(
        self,
        model_name: str,
        manifest: Mapping[str, Any],
        system_properties: Mapping[str, Any],
        model_yaml_config: Mapping[str, Any],
        network: ServedNetwork | None = None,
    ) -> None:
        self.model_name = model_name
        self.manifest = dict(manifest)
        self.system_properties = dict(system_properties)
        self.model_yaml_config = dict(model_yaml_config)
        self.metrics = HandlerMetrics()
        self.network = network
        self.request_ids: dict[int, str] = {}
        self.request_processor: list[RequestProcessor] = []

    def get_request_id(self, idx: int = 0) -> str | None:
        """The id of a request."""
        return self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> Any:
        """A header of a request."""
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, Any]:
        """All headers of a request."""
        return self.request_processor[idx].get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the Content-Type of an answer."""
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        """The Content-Type that was set."""
        return self.get_response_headers(idx).get("content-type")

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Set a header of an answer."""
        self.request_processor[idx].add_response_property(key, value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        """The headers that were set."""
        return self.request_processor[idx].response_headers

    def get_response_status(self, idx: int) -> tuple[int, str]:
        """The status that was set."""
        return self.request_processor[idx].status, ""

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the status of one answer."""
        self.request_processor[idx].report_status(code, phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Set the status of all answers of the batch."""
        for each in self.request_processor:
            each.report_status(code, phrase)


class ServedNetwork:
    """The weights of an archive as a model that the daemon serves: called as the module in PyTorch would be.

    inputs: each with its name, datatype and shape. call: asks the model; set for each run. Gives tensors where torch is
    loaded, else arrays: one output by itself, several by name where they have names of their own, else as a tuple.
    """

    def __init__(self, model: str, version: int, inputs: Sequence[Mapping[str, Any]]) -> None:
        self.model = model
        self.version = version
        self.inputs = inputs
        self.call: Callable[..., Mapping[str, Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the served model. Raises PredictionException outside of a run, and what a client of the model gets."""
        if self.call is None:
            raise PredictionException("the network can be called while a request runs only, not in initialize", 500)
        names = [each["name"] for each in self.inputs]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        arrays = {name: _array(value, each["datatype"]) for name, value, each in _matched(given, self.inputs)}
        outputs = self.call(self.model, arrays, version=self.version)
        found = {name: _tensor(array) for name, array in outputs.items()}
        if len(found) == 1:
            return next(iter(found.values()))
        return tuple(found.values()) if all(re.fullmatch(r"output(_\d+)?", name) for name in found) else found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same."""
        return self(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> ServedNetwork:
        """Itself: the device profile says where it runs."""
        del args, kwargs
        return self

    def eval(self) -> ServedNetwork:
        """Itself."""
        return self


# ---- base handlers --------------------------------------------------------------------------------------------------


class BaseHandler:
    """Loads the network, and answers a batch by preprocess, inference and postprocess."""

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: Any = None
        self.initialized = False
        self.context: Any = None
        self.model_pt_path: str | None = None
        self.manifest: Any = None
        self.map_location: str | None = None
        self.explain = False
        self.target = 0
        self.model_yaml_config: dict[str, Any] = {}

    def initialize(self, context: Any) -> None:
        """Load the network and the names of classes. Raises RuntimeError: nothing here can load it."""
        self.context = context
        self.model_yaml_config = context.model_yaml_config
        self.manifest = context.manifest
        self.map_location = "cpu"
        torch = _torch()
        self.device = torch.device("cpu") if torch is not None else "cpu"
        folder = Path(context.system_properties["model_dir"])
        serialized = self.manifest["model"].get("serializedFile")
        self.model_pt_path = str(folder / serialized) if serialized else None
        self.model = context.network or self._load(folder)
        self.mapping = load_label_mapping(folder / "index_to_name.json")
        self.initialized = True

    def _load(self, folder: Path) -> Any:
        model_file = self.manifest["model"].get("modelFile")
        if model_file:
            return self._load_pickled_model(str(folder), model_file, self.model_pt_path)
        if self.model_pt_path is None:
            return None
        return self._load_torchscript_model(self.model_pt_path)

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        torch = _needed_torch(model_pt_path)
        return torch.jit.load(model_pt_path, map_location="cpu").eval()

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        """The module that the model file defines, with its weights; no other pickle is read than numbers by name."""
        torch = _needed_torch(model_file)
        defined = list_classes_from_module(importlib.import_module(Path(model_dir, model_file).stem), torch.nn.Module)
        if len(defined) != 1:
            named = ", ".join(each.__name__ for each in defined) or "none"
            raise ValueError(f"{model_file}: wanted one class of torch.nn.Module, got {named}")
        model = defined[0]()
        if model_pt_path:
            model.load_state_dict(_numbers(torch, Path(model_pt_path)))
        return model.eval()

    def preprocess(self, data: Any) -> Any:
        """Requests as one tensor."""
        torch = _torch()
        return torch.as_tensor(data, device=self.device) if torch is not None else np.asarray(data)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the network."""
        torch = _torch()
        if torch is None or isinstance(data, np.ndarray):
            return self.model(data, *args, **kwargs)
        with torch.inference_mode():
            return self.model(data.to(self.device) if hasattr(data, "to") else data, *args, **kwargs)

    def postprocess(self, data: Any) -> list[Any]:
        """A list of what each request gets."""
        found: list[Any] = data.tolist()
        return found

    def handle(self, data: Any, context: Any) -> Any:
        """Answer a batch: a list of requests in, a list of answers out."""
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))

    def describe_handle(self) -> Any:
        """Never called: models are described by what is served."""

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """Refuse: explanations need the network's gradients."""
        del data_preprocess, raw_data
        raise PredictionException("explanations are not offered here", 501)


class PictureProcessing:
    """Scales, cuts and normalises a picture (Pillow's) into [3, height, width]; a tensor where torch is loaded."""

    def __init__(
        self,
        shorter_side: int | None = None,
        side: int | None = None,
        mean: Sequence[float] = (0.0,),
        deviation: Sequence[float] = (1.0,),
    ) -> None:
        self._shorter_side, self._side = shorter_side, side
        self._mean = np.array(mean, np.float32).reshape(-1, 1, 1)
        self._deviation = np.array(deviation, np.float32).reshape(-1, 1, 1)

    def __call__(self, picture: Any) -> Any:
        """Return the network's input for one picture."""
        from PIL import Image

        picture = picture.convert("RGB")
        if self._shorter_side is not None:
            width, height = picture.size
            side, shorter = self._shorter_side, min(width, height)
            size = (max(side * width // shorter, side), max(side * height // shorter, side))
            picture = picture.resize(size, Image.Resampling.BILINEAR)
        if self._side is not None:
            left, top = round((picture.width - self._side) / 2), round((picture.height - self._side) / 2)
            picture = picture.crop((left, top, left + self._side, top + self._side))
        pixels = np.asarray(picture, np.float32).transpose(2, 0, 1) / 255
        return _tensor(np.ascontiguousarray((pixels - self._mean) / self._deviation))


class VisionHandler(BaseHandler):
    """Takes a picture a request, or the numbers of one that is scaled already."""

    image_processing: Any = PictureProcessing()

    def preprocess(self, data: Any) -> Any:
        """Pictures as one tensor."""
        pictures = []
        for row in data:
            sent = row.get("data")
            sent = row.get("body") if sent is None else sent
            if isinstance(sent, str):
                sent = base64.b64decode(sent)
            if isinstance(sent, bytearray | bytes | memoryview):
                with bounded_picture(bytes(sent)) as picture:
                    pictures.append(self.image_processing(picture))
            else:
                pictures.append(_tensor(np.asarray(sent, np.float32)))
        return _stacked(pictures)


class ImageClassifier(VisionHandler):
    """The best classes of a picture, by name, with their probabilities."""

    topk = 5
    image_processing: Any = PictureProcessing(SHORTER_SIDE, PICTURE_SIDE, MEAN, DEVIATION)

    def set_max_result_classes(self, topk: int) -> None:
        """Set how many classes an answer has."""
        self.topk = topk

    def get_max_result_classes(self) -> int:
        """Return how many classes an answer has."""
        return self.topk

    def postprocess(self, data: Any) -> list[Any]:
        """Classes and probabilities of each picture."""
        shares = _softmax(_array(data))
        best = np.argsort(-shares, axis=1, kind="stable")[:, : self.topk]
        return map_class_to_label(np.take_along_axis(shares, best, 1).tolist(), self.mapping, best.tolist())


class ImageSegmenter(VisionHandler):
    """For each pixel its class and the probability of that."""

    image_processing: Any = PictureProcessing(SHORTER_SIDE, PICTURE_SIDE, MEAN, DEVIATION)

    def postprocess(self, data: Any) -> list[Any]:
        """[height][width][class, probability] of each picture."""
        if isinstance(data, tuple | list):
            data = data[0]
        shares = _softmax(_array(data["out"] if isinstance(data, Mapping) else data))
        found: list[Any] = np.stack([shares.argmax(1).astype(np.float32), shares.max(1)], axis=3).tolist()
        return found


class ObjectDetector(VisionHandler):
    """Boxes by their classes' names, with scores, as torchvision's detection models find them."""

    threshold = 0.5

    def preprocess(self, data: Any) -> Any:
        """A list of pictures, each of its own size."""
        return [super(ObjectDetector, self).preprocess([row])[0] for row in data]

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Boxes, labels and scores of each picture."""
        if isinstance(self.model, ServedNetwork):
            has_rows = len(self.model.inputs[0]["shape"]) > len(data[0].shape)
            return [_detections(self.model(each[None] if has_rows else each)) for each in data]
        with _needed_torch("a detection model").inference_mode():
            found = self.model(list(data), *args, **kwargs)
        return found[1] if isinstance(found, tuple) else found  # a scripted one gives its losses too

    def postprocess(self, data: Any) -> list[Any]:
        """[{label: [x1, y1, x2, y2], "score": …}, …] of each picture."""
        answers = []
        for each in data:
            boxes, labels, scores = (_array(each[name]) for name in ("boxes", "labels", "scores"))
            told = []
            for box, label, score in zip(boxes.tolist(), labels.tolist(), scores.tolist(), strict=True):
                if score >= self.threshold:
                    (named,) = map_class_to_label([[box]], self.mapping, [[int(label)]])
                    told.append({**named, "score": score})
            answers.append(told)
        return answers


class TextHandler(BaseHandler):
    """Reads text; the vocabulary is `source_vocab.json`, or a `source_vocab.pt` that holds numbers by word alone."""

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Any = None
        self.tokenizer = _basic_english

    def initialize(self, context: Any) -> None:
        """Load the network and the vocabulary. Raises RuntimeError: it cannot be read safely."""
        super().initialize(context)
        self.source_vocab = _vocabulary(Path(context.system_properties["model_dir"]), self.manifest["model"])

    def _remove_html_tags(self, text: str) -> str:
        return re.sub(r"<[^>]*>|&(?:[a-z0-9]+|#[0-9]{1,6}|#x[0-9a-f]{1,6});", "", text)

    def _expand_contractions(self, text: str) -> str:
        for short, long in _CONTRACTIONS:
            text = re.sub(short, long, text)
        return text.replace("'", "")

    def _remove_accented_characters(self, text: str) -> str:
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()

    def _remove_punctuation(self, text: str) -> str:
        return text.translate(str.maketrans("", "", string.punctuation))

    def _tokenize(self, text: str) -> list[str]:
        return self.tokenizer(text)


class TextClassifier(TextHandler):
    """The probability of each class of a text, one text a run."""

    ngrams = 2

    def preprocess(self, data: Any) -> Any:
        """The text's words, and pairs of words, by their numbers."""
        sent = data[0].get("data") or data[0].get("body") or ""
        text = bytes(sent).decode() if isinstance(sent, bytes | bytearray) else str(sent)
        text = self._remove_accented_characters(self._expand_contractions(self._remove_html_tags(text).lower()))
        words = self._tokenize(self._remove_punctuation(text))
        found = [*words]
        for count in range(2, self.ngrams + 1):
            found += [" ".join(words[at : at + count]) for at in range(len(words) - count + 1)]
        numbers = [_number_of(self.source_vocab, word) for word in found]
        return _tensor(np.array(numbers, np.int64))

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the network with the words and the place where the text begins."""
        return super().inference(data, _tensor(np.zeros(1, np.int64)), *args, **kwargs)

    def postprocess(self, data: Any) -> list[Any]:
        """Probabilities by class."""
        return map_class_to_label(_softmax(_array(data)).tolist(), self.mapping)


# ---- functions that handlers import ---------------------------------------------------------------------------------


def load_label_mapping(mapping_file_path: str | Path) -> dict[str, str] | None:
    """Names of classes by number, as text; None where there is no such file. Raises ValueError: it has none."""
    path = Path(mapping_file_path)
    if not path.is_file():
        return None
    mapping = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(mapping, dict):
        raise ValueError(f'{path.name}: wanted {{"0": "name", …}}')
    listed = mapping.get("object_type_names")
    if isinstance(listed, list):
        return {str(index): str(name) for index, name in enumerate(listed)}
    return {number: str(name[-1] if isinstance(name, list) and name else name) for number, name in mapping.items()}


def map_class_to_label(
    probs: Sequence[Sequence[Any]],
    mapping: Mapping[str, str] | None = None,
    lbl_classes: Sequence[Sequence[int]] | None = None,
) -> list[dict[str, Any]]:
    """For each row, the values by their classes' names; the numbers where there are no names."""
    classes = lbl_classes if lbl_classes is not None else itertools.repeat(range(len(probs[0])), len(probs))
    return [
        {(str(number) if mapping is None else mapping[str(number)]): value for number, value in zip(*row, strict=False)}
        for row in zip(classes, probs, strict=False)
    ]


def list_classes_from_module(module: Any, parent_class: type | None = None) -> list[type]:
    """The classes that a module itself defines."""
    found = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
    return [each for each in found if parent_class is None or issubclass(each, parent_class)]


def timed(func: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Return the function: the daemon measures runs."""
    del kwargs
    return func if func is not None else timed


def send_intermediate_predict_response(*args: Any, **kwargs: Any) -> None:
    """Refuse: an answer goes as a whole."""
    del args, kwargs
    raise PredictionException("an answer goes as a whole here; return it from handle", 501)


def offer_modules() -> None:
    """Put `ts` and its modules among this process's modules."""
    contents: dict[str, tuple[Any, ...]] = {
        "ts": (),
        "ts.context": (HandlerContext, RequestProcessor),
        "ts.service": (),
        "ts.metrics": (),
        "ts.metrics.metric_type_enum": (_MetricTypes,),
        "ts.metrics.dimension": (_Dimension,),
        "ts.protocol": (),
        "ts.protocol.otf_message_handler": (send_intermediate_predict_response,),
        "ts.utils": (),
        "ts.utils.util": (PredictionException, list_classes_from_module, load_label_mapping, map_class_to_label),
        "ts.handler_utils": (),
        "ts.handler_utils.timer": (timed,),
        "ts.torch_handler": (),
        "ts.torch_handler.base_handler": (BaseHandler,),
        "ts.torch_handler.vision_handler": (VisionHandler,),
        "ts.torch_handler.image_classifier": (ImageClassifier,),
        "ts.torch_handler.image_segmenter": (ImageSegmenter,),
        "ts.torch_handler.object_detector": (ObjectDetector,),
        "ts.torch_handler.text_handler": (TextHandler,),
        "ts.torch_handler.text_classifier": (TextClassifier,),
    }
    for name, offered in contents.items():
        module = types.ModuleType(name, "Offered by edge-runtime to handlers of TorchServe.")
        module.__path__ = []
        for each in offered:
            setattr(module, _OWN_NAMES.get(each, each.__name__), each)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    setattr(sys.modules["ts"], "__version__", "0.12.0")  # noqa: B010 (a module has no such attribute)


BUILT_IN: Mapping[str, type[BaseHandler]] = {
    "base_handler": BaseHandler,
    "image_classifier": ImageClassifier,
    "image_segmenter": ImageSegmenter,
    "object_detector": ObjectDetector,
    "text_classifier": TextClassifier,
}
"""TorchServe's own handlers by the name in a manifest."""


# ---- private --------------------------------------------------------------------------------------------------------


class _MetricTypes:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class _Dimension:
    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value


_OWN_NAMES: Mapping[Any, str] = {HandlerContext: "Context", _MetricTypes: "MetricTypes", _Dimension: "Dimension"}
"""TorchServe's names for classes that have another here."""

_CONTRACTIONS = (
    (r"won't", "will not"),
    (r"can't", "can not"),
    (r"n't\b", " not"),
    (r"'re\b", " are"),
    (r"'ll\b", " will"),
    (r"'ve\b", " have"),
    (r"'m\b", " am"),
    (r"'d\b", " would"),
    (r"\b(he|she|it|that|there|what|where|who|how)'s\b", r"\1 is"),
)


def _torch() -> Any:
    """PyTorch, where the handler has imported it: it takes 200 MB, and seconds."""
    return sys.modules.get("torch")


def _needed_torch(what: str) -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise RuntimeError(f"{Path(what).name} needs torch, which is not installed: {WITHOUT_TORCH}") from None


def _array(value: Any, datatype: str = "") -> Any:
    """A tensor, a list or an array as an array, of a datatype of the wire where one is named."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    kind = _KINDS.get(datatype)
    return np.ascontiguousarray(array if kind is None else array.astype(kind, copy=False))


_KINDS = {
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32,
    "INT64": np.int64, "UINT8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


def _tensor(array: Any) -> Any:
    torch = _torch()
    if torch is None or not isinstance(array, np.ndarray) or array.dtype == object:
        return array
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _stacked(found: Sequence[Any]) -> Any:
    torch = _torch()
    if torch is not None and any(isinstance(each, torch.Tensor) for each in found):
        return torch.stack(list(found))
    return np.stack(found)


def _matched(given: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any, Mapping[str, Any]]]:
    missing = [each["name"] for each in inputs if each["name"] not in given]
    if missing or len(given) != len(inputs):
        wanted = ", ".join(each["name"] for each in inputs)
        raise TypeError(f"the network takes {wanted}; got {', '.join(given) or 'nothing'}")
    return [(each["name"], given[each["name"]], each) for each in inputs]


def _softmax(logits: Any) -> Any:
    """Along axis 1."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _detections(found: Any) -> Mapping[str, Any]:
    """Return a detection model's outputs for one picture, by name, without an axis of rows."""
    named = found if isinstance(found, Mapping) else dict(zip(("boxes", "labels", "scores"), found, strict=False))
    absent = {"boxes", "labels", "scores"} - set(named)
    if absent:
        raise PredictionException(f"the network gives no {', '.join(sorted(absent))}; got {', '.join(named)}", 500)
    boxes, labels, scores = (_array(named[name]) for name in ("boxes", "labels", "scores"))
    return {"boxes": boxes.reshape(-1, 4), "labels": labels.reshape(-1), "scores": scores.reshape(-1)}


def _basic_english(text: str) -> list[str]:
    return text.lower().split()


def _vocabulary(folder: Path, model: Mapping[str, Any]) -> Any:
    """Numbers by word. Raises RuntimeError: it is not there, or it is a pickle of more than numbers."""
    json_file = folder / "source_vocab.json"
    if json_file.is_file():
        return json.loads(json_file.read_text(encoding="utf-8"))
    pickled = folder / Path(str(model.get("sourceVocab", "source_vocab.pt"))).name
    advice = (
        'write it as JSON where it was made: json.dump(vocab.get_stoi(), open("source_vocab.json", "w")), and put that '
        "file into the archive"
    )
    if not pickled.is_file():
        raise RuntimeError(f"{pickled.name} is not in the archive: {advice}")
    torch = _needed_torch(pickled.name)
    return _numbers(torch, pickled, advice)


def _numbers(torch: Any, pickled: Path, advice: str = "where it was made, save model.state_dict()") -> Any:
    """Return the content of a pickle of PyTorch's, if that is numbers and names alone. Raises RuntimeError."""
    try:
        return torch.load(pickled, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 (pickle's own error has its name there only, and is imported nowhere)
        log.info("torch: %s", error)
        raise RuntimeError(f"{pickled.name} holds more than numbers and names, so it is not read: {advice}") from None


def _number_of(vocabulary: Any, word: str) -> int:
    """A word's number; that of `<unk>`, else 0, for one that is not in the vocabulary."""
    if isinstance(vocabulary, Mapping):
        return int(vocabulary.get(word, vocabulary.get("<unk>", 0)))
    return int(vocabulary[word])

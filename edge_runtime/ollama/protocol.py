"""Ollama's paths on the HTTP door: which they are, and what answers each.

Owns: the calls, and how models are described. chat.py and embed.py know what bodies mean, errors.py how errors are
worded. Thread: the door's; `read` any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from edge_runtime import __version__
from edge_runtime.daemon.doors import DoorContext
from edge_runtime.doors.http.answer import response
from edge_runtime.doors.http.call import INFER, HttpCall
from edge_runtime.doors.http.head import HttpHead
from edge_runtime.doors.http.protocols import CallRequests, paths
from edge_runtime.doors.open_inference.operations import Caller, OpenInference
from edge_runtime.errors import ModelNotFound, Unsupported
from edge_runtime.language.asking import sees_pictures, writes_text
from edge_runtime.language.texts import embedding_of
from edge_runtime.models.model_table import ModelTable, VersionState
from edge_runtime.models.servable import Servable
from edge_runtime.ollama.chat import chat_requests, generate_requests
from edge_runtime.ollama.embed import embed_requests
from edge_runtime.ollama.errors import OllamaErrors
from edge_runtime.ollama.fields import LATEST, model_name
from edge_runtime.ollama.written import LINES_TYPE
from edge_runtime.request.operation_handlers import Done
from edge_runtime.request.replies import Encoding
from edge_runtime.wire import codec, json_codec

TAGS, LOADED, SHOW, PULL = "ollama_tags", "ollama_loaded", "ollama_show", "ollama_pull"
VERSION, LIVE, CHANGE = "ollama_version", "ollama_live", "ollama_change"

REQUESTS: Mapping[str, Callable[[Servable, Mapping[str, Any], HttpHead, HttpCall], CallRequests]] = {
    "chat": chat_requests,
    "generate": generate_requests,
    "embed": embed_requests,
    "embeddings": embed_requests,
}
"""What a body means, by the end of its path."""

SPOKEN_VERSION = "0.12.0"
"""The version of Ollama whose paths and fields these are: some clients want a least one."""

ALIVE = b"Ollama is running"
"""What Ollama answers at its root, by which clients see that it is there."""

NEVER = "1970-01-01T00:00:00Z"
"""When a model was changed: clients want it, and no model says it."""

NO_END = "9999-12-31T23:59:59Z"
"""Until when a model is kept: as long as it is served."""

READY, ON_DEMAND = VersionState.READY.value, VersionState.ON_DEMAND.value


def open_protocol(context: DoorContext, protocol: OpenInference) -> Ollama:
    """Return the protocol that answers Ollama's paths. `GET /` is its own where no other protocol may have it."""
    settings = context.settings("http")
    has_root = settings.page is False and not settings.tensorflow_serving
    return Ollama(protocol, context.core.table, has_root=has_root)


class Ollama:
    """Ollama's calls, as requests for inference and operations of the one table."""

    open_calls = frozenset((LIVE,))

    def __init__(self, protocol: OpenInference, table: ModelTable, *, has_root: bool) -> None:
        self.paths = paths(
            (r"/api/(?P<asks>chat|generate|embed|embeddings)", {"POST": INFER}),
            (r"/api/tags", {"GET": TAGS}),
            (r"/api/ps", {"GET": LOADED}),
            (r"/api/show", {"POST": SHOW}),
            (r"/api/pull", {"POST": PULL}),
            (r"/api/version", {"GET": VERSION}),
            (r"/api/(?P<change>push|create|copy|delete|blobs/.+)", dict.fromkeys(("POST", "DELETE", "HEAD"), CHANGE)),
            (r"/", {"HEAD": LIVE, **({"GET": LIVE} if has_root else {})}),
        )
        self._protocol = protocol
        self._table = table

    def encoding(self, call: HttpCall) -> Encoding:
        """Return the encoding that words errors as Ollama does."""
        del call
        return OllamaErrors()

    def understand(self, head: HttpHead, call: HttpCall) -> None:
        """Refuse what changes models. Raises Unsupported."""
        del head
        call.ignores_body = call.name not in (INFER, SHOW, PULL)
        if call.name == CHANGE:
            raise Unsupported(
                f"/api/{call.values['change'].partition('/')[0]} is not offered: models come and go as folders of the "
                "models folder, or as signed updates"
            )

    def claims(self, call: HttpCall) -> bool:
        """No: it shares no path of inference."""
        del call
        return False

    def reads_long(self, body: bytes | memoryview, head: HttpHead) -> bool:
        """Yes: its bodies are JSON."""
        del body, head
        return True

    def read(self, body: bytes | memoryview, head: HttpHead, call: HttpCall) -> dict[str, Any]:
        """Read the fields of a body. Raises DecodeFailed."""
        del head, call
        return json_codec.loads(bytes(body))

    def model_of(self, message: dict[str, Any], call: HttpCall) -> tuple[str, int | None]:
        """Return the model that a body names. Raises DecodeFailed."""
        del call
        return model_name(message), None

    def requests_of(self, servable: Servable, message: dict[str, Any], head: HttpHead, call: HttpCall) -> CallRequests:
        """Return the requests that a body means. Raises EdgeRuntimeError."""
        return REQUESTS[call.values["asks"]](servable, message, head, call)

    def call(self, call: HttpCall, fields: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        """Tell of models, and of this server. Raises EdgeRuntimeError."""
        if call.name == VERSION:
            reply(({"version": SPOKEN_VERSION, "edge_runtime": __version__}, 200))
        elif call.name == LIVE:
            reply(response((ALIVE,), "text/plain; charset=utf-8"))
        elif call.name in (TAGS, LOADED):
            running = {"size_vram": 0, "expires_at": NO_END} if call.name == LOADED else {}
            states = (READY,) if call.name == LOADED else (READY, ON_DEMAND)
            self._tell(caller, reply, lambda found: ({"models": [{**each, **running} for each in found]}, 200), states)
        else:
            name = model_name(fields)
            shape = _pulled if call.name == PULL else self._shown
            is_stream = codec.typed(fields, "stream", bool, True)

            def respond(listed: Sequence[dict[str, Any]]) -> Any:
                model = next((each for each in listed if each["name"] == name + LATEST), None)
                return ModelNotFound(_absent(name)) if model is None else shape(name, model, is_stream=is_stream)

            self._tell(caller, reply, respond, (READY, ON_DEMAND))

    def close(self) -> None:
        """Nothing: it keeps nothing."""

    def _tell(
        self, caller: Caller, reply: Done, respond: Callable[[list[dict[str, Any]]], Any], states: Sequence[str]
    ) -> None:
        """Answer by the descriptions of the models in these states that write text or make vectors of it."""

        def shape(entries: list[dict[str, Any]]) -> Any:
            kinds = {each.model: _capabilities(each) for each in self._table.live()}
            newest: dict[str, dict[str, Any]] = {}
            for each in entries:
                is_one = each["version"] is not None and each["state"] in states and kinds.get(each["name"], True)
                if is_one and each["version"] >= newest.get(each["name"], each)["version"]:
                    newest[each["name"]] = each
            return respond([_model_fields(newest[name]) for name in sorted(newest)])

        self._protocol.operate("models", {}, caller, reply, shape)

    def _shown(self, name: str, model: Mapping[str, Any], *, is_stream: bool) -> Any:
        """Describe a model and its abilities. One that is not loaded yet is taken for a language model."""
        del is_stream
        servable = next((each for each in self._table.live() if each.model == name), None)
        told = {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": model["details"],
            "model_info": {"general.architecture": "openvino"},
            "capabilities": ["completion", "tools"] if servable is None else _capabilities(servable),
            "modified_at": NEVER,
        }
        return told, 200


# ---- private --------------------------------------------------------------------------------------------------------


def _capabilities(servable: Servable) -> list[str]:
    """The abilities of a model in Ollama's words; empty: none that its clients ask for."""
    if writes_text(servable):
        return ["completion", "tools", *(["vision"] if sees_pictures(servable) else [])]
    return ["embedding"] if embedding_of(servable) is not None else []


def _model_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    name = entry["name"] + LATEST
    return {
        "name": name,
        "model": name,
        "modified_at": NEVER,
        "size": entry["memory_bytes"],
        "digest": sha256(f"{entry['name']} {entry['version']}".encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "openvino",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": entry["precision"],
        },
    }


def _pulled(name: str, model: Mapping[str, Any], *, is_stream: bool) -> Any:
    """The answer to a pull of a model that is here."""
    del name, model
    done = {"status": "success"}
    return response((json_codec.dumps(done), b"\n"), LINES_TYPE) if is_stream else (done, 200)


def _absent(name: str) -> str:
    return (
        f"model {codec.short(name)} not found, and none is fetched from a registry: put its folder of OpenVINO's files "
        f"into the models folder as {name if name.isascii() else 'NAME'}/1 (optimum-cli export openvino makes it), "
        "or publish it as a signed update; GET /api/tags lists what is here"
    )

"""Who has models loaded: a Triton repository in every mode of model control, asked by Triton's own clients."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.running_daemon import put_model, running_daemon
from tests.models import onnx_models

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")

CLIENTS = {"http": tritonclient.http, "grpc": tritonclient.grpc}

NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"


class Server:
    """A running daemon as one of Triton's clients sees it."""

    def __init__(self, daemon, kind: str) -> None:
        self.daemon = daemon
        address = daemon.doors[kind].endpoints[0].partition("://")[2]
        self.client = CLIENTS[kind].InferenceServerClient(address)
        self._unavailable = {"http": "503", "grpc": "StatusCode.UNAVAILABLE"}[kind]

    def index(self) -> dict[str, tuple[str, str, str]]:
        """Version, state and reason by name; of what was never loaded all are empty."""
        found = self.client.get_model_repository_index()
        if not isinstance(found, list):
            return {each.name: (each.version, each.state, each.reason) for each in found.models}
        assert all(each.keys() in ({"name"}, {"name", "version", "state", "reason"}) for each in found), found
        return {each["name"]: tuple(each.get(key, "") for key in ("version", "state", "reason")) for each in found}

    def refuses(self, call, model: str) -> None:
        with pytest.raises(InferenceServerException, match=NOT_ALLOWED) as caught:
            call(model)
        assert caught.value.status() == self._unavailable


@pytest.fixture(params=list(CLIENTS))
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    for name in ("first", "second"):
        put_model(repository, name, onnx_models.mlp)
    return repository


@pytest.fixture
def serving(tmp_path, kind):
    @contextmanager
    def serve(repository, **settings) -> Iterator[Server]:
        doors = {
            "http": HttpSettings(endpoint="127.0.0.1:0", control=True, server_name="triton"),
            "grpc": GrpcSettings(endpoint="127.0.0.1:0", control=True, server_name="triton"),
        }
        with running_daemon(repository, tmp_path / "run", calibrate=False, **doors, **settings) as daemon:
            server = Server(daemon, kind)
            try:
                yield server
            finally:
                server.client.close()

    return serve


READY, UNLOADED, NEVER_LOADED = ("1", "READY", ""), ("1", "UNAVAILABLE", "unloaded"), ("", "", "")


def test_without_a_mode_the_folder_is_served_and_callers_may_load_and_unload(serving, repository):
    with serving(repository) as server:
        assert server.index() == {"first": READY, "second": READY}

        server.client.unload_model("first")
        assert server.index() == {"first": UNLOADED, "second": READY}
        with pytest.raises(InferenceServerException, match="unknown model: 'first' has no available versions"):
            server.client.get_model_metadata("first")

        server.client.load_model("first")
        assert server.index()["first"] == READY


def test_a_server_may_say_that_it_is_called_triton_which_scripts_look_for(serving, repository):
    with serving(repository, model_control="explicit") as server:
        told = server.client.get_server_metadata()
        assert (told["name"] if isinstance(told, dict) else told.name) == "triton"


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_with_none_and_poll_the_start_loads_all_and_no_caller_may_load_or_unload(serving, repository, mode):
    with serving(repository, model_control=mode) as server:
        server.refuses(server.client.load_model, "first")
        server.refuses(server.client.unload_model, "first")
        assert server.index() == {"first": READY, "second": READY}


def test_with_explicit_nothing_is_loaded_until_somebody_asks(serving, repository):
    with serving(repository, model_control="explicit") as server:
        assert server.client.is_server_ready()
        assert server.index() == {"first": NEVER_LOADED, "second": NEVER_LOADED}
        assert not server.client.is_model_ready("first")

        server.client.load_model("second")
        assert server.index() == {"first": NEVER_LOADED, "second": READY}
        server.client.unload_model("second")
        assert server.index() == {"first": NEVER_LOADED, "second": UNLOADED}
        with pytest.raises(InferenceServerException, match="failed to load 'absent', failed to poll from model rep"):
            server.client.load_model("absent")


@pytest.mark.parametrize(
    ("named", "second"), [(("first",), NEVER_LOADED), (("*",), READY), (("first", "second", "absent"), READY)]
)
def test_with_explicit_the_start_loads_the_models_named_for_it(serving, repository, named, second):
    with serving(repository, model_control="explicit", load_models=named) as server:
        assert server.index() == {"first": READY, "second": second}


def test_where_the_folder_is_not_followed_its_changes_are_served_by_a_load_only(serving, repository, tmp_path):
    own = tmp_path / "repository"
    shutil.copytree(repository, own)
    with serving(own, model_control="explicit", load_models=("first",)) as server:
        put_model(own, "third", onnx_models.mlp)
        put_model(own, "first", onnx_models.mlp, version=2)
        shutil.rmtree(own / "second")
        server.client.load_model("third")  # looks at the folder

        assert server.client.get_model_metadata("first") is not None
        assert server.index()["third"] == READY
        assert server.client.is_model_ready("first", "1")
        assert not server.client.is_model_ready("first", "2")

        server.client.load_model("first")
        assert server.client.is_model_ready("first", "2")


ADDED = """
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""

ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling { step [ {
  model_name: "STEP" model_version: -1 input_map { key: "GIVEN" value: "IN" } output_map { key: "MADE" value: "OUT" }
} ] }
"""


def put_ensembles(repository) -> None:
    """Put `outer`, whose step is the ensemble `inner`, whose step is the model `added`."""
    put_model(repository, "added", onnx_models.added, constant=1.0)
    (repository / "added" / "config.pbtxt").write_text(ADDED)
    for name, (asked, given, made) in {"inner": ("added", "x", "y"), "outer": ("inner", "IN", "OUT")}.items():
        (repository / name / "1").mkdir(parents=True)
        text = ENSEMBLE.replace("STEP", asked).replace("GIVEN", given).replace("MADE", made)
        (repository / name / "config.pbtxt").write_text(text)


@pytest.mark.parametrize("mode", [None, "explicit"])
def test_a_load_of_what_was_copied_a_moment_ago_brings_all_that_it_needs(serving, tmp_path, mode):
    own = tmp_path / "repository"
    put_model(own, "first", onnx_models.mlp)
    with serving(own, model_control=mode) as server:
        put_ensembles(own)
        server.client.load_model("outer")
        assert [name for name in ("outer", "inner", "added") if not server.client.is_model_ready(name)] == []


def index_of(server: Server, names: set[str]) -> dict[str, tuple[str, str, str]]:
    """The index, once it has these names: at once, unless the loader looks at the folder itself at that moment."""
    for _ in range(20):
        if (found := server.index()).keys() == names:
            return found
    raise AssertionError(f"the index has {sorted(found)}")


@pytest.mark.parametrize("mode", [None, "poll", "explicit", "none"])
def test_the_index_shows_at_once_what_was_copied_a_moment_ago(serving, tmp_path, mode):
    own = tmp_path / "repository"
    put_model(own, "first", onnx_models.mlp)
    with serving(own, model_control=mode) as server:
        put_ensembles(own)
        index = index_of(server, {"first", "outer", "inner", "added"})
        new = [index[name] for name in ("outer", "inner", "added")]
        if mode in {None, "poll"}:
            # A slow machine has taken some by now.
            assert all(state == "READY" or "when its files have not changed for 2 s" in why for _, state, why in new)
        else:
            assert set(new) == {NEVER_LOADED}
        shutil.rmtree(own / "outer")
        index_of(server, {"first", "inner", "added"})


def test_an_unload_of_dependents_takes_along_what_nobody_asked_for_by_name(serving, tmp_path):
    own = tmp_path / "repository"
    put_model(own, "first", onnx_models.mlp)
    with serving(own, model_control="explicit") as server:
        put_ensembles(own)
        server.client.load_model("outer")
        server.client.load_model("inner")
        server.client.unload_model("outer", unload_dependents=True)
        assert server.client.is_model_ready("inner")
        assert server.client.is_model_ready("added")

        server.client.unload_model("inner", unload_dependents=True)
        assert not server.client.is_model_ready("inner")
        assert not server.client.is_model_ready("added")
        server.client.load_model("outer")
        server.client.unload_model("outer", unload_dependents=True)
        assert [name for name in ("outer", "inner", "added") if server.client.is_model_ready(name)] == []

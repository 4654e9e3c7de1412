"""What `edge-runtime import` takes of MLflow, BentoML, Optimum and OpenVINO Model Server, in their own layouts."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from edge_runtime.config.loading import lay_over, read_model_keys
from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.importing.report import ImportedModel, ImportReport
from edge_runtime_converters.importing.writing import ImportOptions, import_source
from tests.models import ir_models, onnx_models

pytest.importorskip("yaml")

Take = Callable[..., ImportReport]

ROW = np.arange(16, dtype=np.float32).reshape(1, 16) / 16


@pytest.fixture
def take(tmp_path: Path) -> Take:
    def call(source: Path, **options: Any) -> ImportReport:
        return import_source(ImportOptions(source=str(source), models=str(tmp_path / "models"), **options))

    return call


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A daemon that serves what was imported of one source of each system."""
    folder = tmp_path_factory.mktemp("sources")
    models = tmp_path_factory.mktemp("run") / "models"
    for source in (
        mlflow(folder / "mlflow-mlp"), bento(folder / "bento"), image_export(folder / "colours"),
        text_export(folder / "reviews"), model_server(folder / "ovms", pipeline_config_list=[DAG]),
    ):  # fmt: skip
        report = import_source(ImportOptions(source=str(source), models=str(models)))
        assert report.is_whole, [model.reason for model in report.models]
    config = Config(state=str(models.parent / "state"), watch=False, calibrate=False)
    with Runtime(models, config=config) as runtime:
        yield runtime


def only(report: ImportReport) -> ImportedModel:
    (model,) = report.models
    return model


def expected() -> Any:
    first, second = onnx_models.mlp_weights()
    return np.maximum(ROW @ first, 0) @ second


# ---- MLflow ---------------------------------------------------------------------------------------------------------

ONNX_FLAVOR = """
artifact_path: model
flavors:
  onnx:
    code: null
    data: model.onnx
    onnx_session_options: null
    onnx_version: 1.17.0
    providers:
    - CUDAExecutionProvider
    - CPUExecutionProvider
  python_function:
    data: model.onnx
    env:
      conda: conda.yaml
      virtualenv: python_env.yaml
    loader_module: mlflow.onnx
    python_version: 3.11.4
mlflow_version: 2.20.1
model_uuid: 7de8f1b1d3b14b3e8ee0d7c0d9b0a7f6
signature:
  inputs: '[{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 16]}}]'
  outputs: '[{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 4]}}]'
  params: null
utc_time_created: '2025-02-11 10:20:30.400000'
"""

SKLEARN_FLAVOR = """
flavors:
  python_function: {env: {conda: conda.yaml}, loader_module: mlflow.sklearn, model_path: model.pkl}
  sklearn: {code: null, pickled_model: model.pkl, serialization_format: cloudpickle, sklearn_version: 1.5.2}
signature:
  inputs: '[{"type": "double", "name": "age", "required": true}, {"type": "double", "name": "income"}]'
"""


def mlflow(folder: Path, text: str = ONNX_FLAVOR) -> Path:
    onnx_models.mlp(folder)
    (folder / "MLmodel").write_text(text)
    (folder / "requirements.txt").write_text("onnx==1.17.0\n")
    return folder


def test_an_mlflow_model_in_onnx_answers_as_its_file_does(served: Runtime) -> None:
    assert np.allclose(served.infer("mlflow-mlp", {"x": ROW}).outputs["y"], expected(), atol=1e-5)


def test_an_mlflow_pickle_is_refused_unread_with_the_way_out(take: Take, tmp_path: Path) -> None:
    folder = mlflow(tmp_path / "churn", SKLEARN_FLAVOR)
    (folder / "model.pkl").write_bytes(b"\x80\x04cos\nsystem\n.")
    model = only(take(folder))
    assert model.state == "refused"
    assert "skops.io.dump(mlflow.sklearn.load_model" in model.reason
    assert list((tmp_path / "models").iterdir()) == []


def test_an_mlflow_function_of_python_says_where_code_goes(take: Take, tmp_path: Path) -> None:
    folder = mlflow(tmp_path / "m", "flavors: {python_function: {loader_module: mlflow.pyfunc.model}}")
    assert "model.py" in only(take(folder)).reason


def test_a_path_in_mlmodel_that_leads_out_is_refused(take: Take, tmp_path: Path) -> None:
    (tmp_path / "secret.onnx").write_bytes(b"x")
    folder = mlflow(tmp_path / "m", "flavors: {onnx: {data: ../secret.onnx}}")
    assert "leads out of" in only(take(folder)).reason


def test_a_folder_of_mlflow_models_is_all_of_them(take: Take, tmp_path: Path) -> None:
    for name in ("one", "two"):
        mlflow(tmp_path / "all" / name)
    assert [(model.name, model.state) for model in take(tmp_path / "all").models] == [
        ("one", "taken"),
        ("two", "taken"),
    ]


@pytest.mark.parametrize("text", ["flavors: [1]", "flavors: {onnx: {}}", "- a", "", "flavors: {onnx: 3}"])
def test_an_mlmodel_that_is_none_is_refused(take: Take, tmp_path: Path, text: str) -> None:
    model = only(take(mlflow(tmp_path / "m", text)))
    assert model.state == "refused"
    assert "MLmodel" in model.reason


# ---- BentoML --------------------------------------------------------------------------------------------------------

BENTO_MODEL = """
name: {name}
version: {version}
module: bentoml.{framework}
labels: {{}}
options: {{}}
metadata: {{}}
context:
  framework_name: {framework}
  framework_versions: {{{framework}: 1.17.0}}
  bentoml_version: 1.1.11
  python_version: 3.11.4
signatures:
  {method}: {{batchable: true, batch_dim: [0, 0]}}
api_version: v2
creation_time: '2024-01-11T10:20:30.400000+00:00'
"""

BENTO = """
service: service:svc
name: mlp_service
version: x7kd2crvlkq2yfob
bentoml_version: 1.1.11
models:
- {tag: 'bento_mlp:vkorlosfifi6zhqq', module: bentoml.onnx}
"""


def bento_model(folder: Path, name: str = "bento_mlp", framework: str = "onnx", method: str = "run") -> Path:
    onnx_models.save(folder, onnx.load(str(onnx_models.mlp(folder))).graph, name="saved_model.onnx")
    (folder / "model.onnx").unlink()
    words = {"name": name, "version": folder.name, "framework": framework, "method": method}
    (folder / "model.yaml").write_text(BENTO_MODEL.format(**words))
    return folder


def bento(folder: Path) -> Path:
    bento_model(folder / "models" / "bento_mlp" / "vkorlosfifi6zhqq")
    (folder / "models" / "bento_mlp" / "latest").write_text("vkorlosfifi6zhqq")
    (folder / "src").mkdir()
    (folder / "src" / "service.py").write_text("import bentoml\n")
    (folder / "bento.yaml").write_text(BENTO)
    return folder


def test_a_bento_serves_its_model_and_says_that_its_service_is_code(
    served: Runtime, take: Take, tmp_path: Path
) -> None:
    assert np.allclose(served.infer("bento_mlp", {"x": ROW}).outputs["y"], expected(), atol=1e-5)
    report = take(bento(tmp_path / "b"))
    assert any("service:svc, is code" in note for note in report.notes)


def test_the_latest_version_of_a_model_store_is_taken_and_the_others_are_reported(take: Take, tmp_path: Path) -> None:
    for version in ("aaaa", "bbbb"):
        bento_model(tmp_path / "store" / "m" / version, "m")
    (tmp_path / "store" / "m" / "latest").write_text("aaaa\n")
    report = take(tmp_path / "store")
    assert only(report).state == "taken"
    assert report.notes == ("m: version aaaa was taken; left out: bbbb",)


def test_an_exported_bento_model_is_unpacked(take: Take, tmp_path: Path) -> None:
    folder = bento_model(tmp_path / "model")
    with tarfile.open(tmp_path / "mlp.bentomodel", "w:gz") as archive:
        archive.add(folder, arcname=".")
    model = only(take(tmp_path / "mlp.bentomodel"))
    assert (model.state, model.files) == ("taken", ("1/model.onnx",)), model.reason


def test_a_bento_archive_that_leads_out_is_refused(take: Take, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.bento", "w:gz") as archive:
        member = tarfile.TarInfo("../out")
        archive.addfile(member, io.BytesIO(b""))
    with pytest.raises(Exception, match="leads out of it"):
        take(tmp_path / "bad.bento")
    assert not (tmp_path / "out").exists()


def test_a_pickle_of_bentoml_is_refused_with_the_way_out(take: Take, tmp_path: Path) -> None:
    folder = bento_model(tmp_path / "m", framework="sklearn", method="predict")
    (folder / "saved_model.onnx").unlink()
    (folder / "saved_model.pkl").write_bytes(b"\x80\x04.")
    assert "skops.io.dump(bentoml.sklearn" in only(take(folder)).reason


# ---- Optimum --------------------------------------------------------------------------------------------------------

PREPROCESSOR = {
    "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5, 0.25, 0.5],
    "image_processor_type": "ViTImageProcessor", "image_std": [0.5, 0.25, 0.5], "resample": 2,
    "rescale_factor": 1 / 255, "size": {"height": 8, "width": 8},
}  # fmt: skip


def image_export(folder: Path, preprocessor: dict[str, Any] | None = None) -> Path:
    """pixel_values [n, 3, 8, 8] -> logits [n, 3], as optimum-cli exports an image classifier."""
    node = helper.make_node("ReduceMean", ["pixel_values"], ["logits"], axes=[2, 3], keepdims=0)
    shape = ["batch_size", 3, 8, 8]
    inputs = [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch_size", 3])]
    onnx_models.save(folder, helper.make_graph([node], "main", inputs, outputs))
    labels = {"0": "red", "1": "green", "2": "blue"}
    config = {"architectures": ["ViTForImageClassification"], "model_type": "vit", "id2label": labels}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **(preprocessor or {})}))
    return folder


def text_export(folder: Path) -> Path:
    """input_ids [n, length] -> logits [n, 2]: how many ids are there, and how many are not."""
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["ids", "axis"], ["sum"], keepdims=1),
        helper.make_node("Neg", ["sum"], ["not"]),
        helper.make_node("Concat", ["sum", "not"], ["logits"], axis=1),
    ]
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch_size", 2])]
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
    onnx_models.save(folder, helper.make_graph(nodes, "main", inputs, outputs, [axis]))
    shutil.copyfile(folder / "model.onnx", folder / "model_quantized.onnx")
    config = {
        "architectures": ["DistilBertForSequenceClassification"], "model_type": "distilbert",
        "id2label": {"0": "POSITIVE", "1": "NEGATIVE"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        (folder / name).write_text("{}")
    return folder


def test_an_export_of_optimum_takes_pictures_and_answers_with_its_labels(served: Runtime) -> None:
    content = io.BytesIO()
    Image.new("RGB", (30, 20), (0, 255, 0)).save(content, "PNG")
    best = served.infer("colours", picture=content.getvalue()).answers[0].classes[0]
    assert best.label == "green"
    # (255 / 255 - 0.25) / 0.25 for green, -1 for the others
    raw = served.infer("colours", picture=content.getvalue(), raw=True).outputs["logits"]
    assert np.allclose(raw, [[-1, 3, -1]], atol=1e-3)


def test_an_export_of_optimum_for_text_is_asked_with_ids_and_its_tokenizer_is_reported(
    served: Runtime, take: Take, tmp_path: Path
) -> None:
    reply = served.infer("reviews", {"input_ids": np.array([[1, 2, 3]])})
    assert reply.outputs["logits"].tolist() == [[6.0, -6.0]]
    model = only(take(text_export(tmp_path / "t")))
    assert {"labels.txt", "tokenizer.json", "1/model.onnx", "1/model.int8.onnx"} <= set(model.files)
    assert any("its tokenizer is not run here" in note for note in model.notes)


def test_a_snapshot_of_links_says_how_to_copy_it(take: Take, tmp_path: Path) -> None:
    blobs = text_export(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    with pytest.raises(ConversionFailed, match="cp -rL"):
        take(snapshot)


def test_an_export_in_parts_is_a_model_each(take: Take, tmp_path: Path) -> None:
    folder = text_export(tmp_path / "t5")
    for name in ("encoder_model", "decoder_model"):
        shutil.copyfile(folder / "model.onnx", folder / f"{name}.onnx")
    for name in ("model.onnx", "model_quantized.onnx"):
        (folder / name).unlink()
    report = take(folder)
    assert [model.name for model in report.models] == ["t5-decoder_model", "t5-encoder_model"]
    assert report.is_whole


def test_an_export_for_openvino_is_taken_with_its_weights(take: Take, tmp_path: Path) -> None:
    folder = image_export(tmp_path / "ov")
    ir_models.from_onnx(folder / "model.onnx", folder, "openvino_model.xml")
    (folder / "model.onnx").unlink()
    (folder / "openvino_tokenizer.xml").write_text("<net/>")
    model = only(take(folder))
    assert model.state == "taken", model.reason
    assert {"1/model.xml", "1/model.bin", "model.toml", "labels.txt"} == set(model.files)


@pytest.mark.parametrize(
    ("said", "declared"),
    [
        ({"size": {"shortest_edge": 10}, "crop_size": {"height": 8, "width": 8}, "do_center_crop": True},
         {"fit": "crop", "shorter_side": 10, "size": (8, 8)}),
        ({"size": 8, "crop_size": 8, "do_center_crop": True}, {"fit": "stretch", "size": (8, 8)}),
        ({"resample": 3, "do_normalize": False}, {"filter": "bicubic", "mean": (0.0,), "scale": (1 / 255,)}),
        ({"do_rescale": False, "do_normalize": False}, {"scale": (1.0,)}),
        ({"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}, "crop_pct": 0.875},
         {"fit": "crop", "shorter_side": 256, "size": (224, 224)}),
        ({"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}},
         {"fit": "stretch", "size": (384, 384)}),
    ],
)  # fmt: skip
def test_the_work_of_a_processor_becomes_a_declared_step(
    take: Take, tmp_path: Path, said: dict[str, Any], declared: dict[str, Any]
) -> None:
    model = only(take(image_export(tmp_path / "m", said)))
    table = lay_over(read_model_keys(Path(model.folder) / "model.toml"), {}, "").input["pixel_values"]
    for key, value in declared.items():
        found = getattr(table, key)
        assert found == value or np.allclose(found, value), (key, found)


@pytest.mark.parametrize(
    "said",
    [
        {"size": {"shortest_edge": 800, "longest_edge": 1333}}, {"resample": 5}, {"do_resize": False},
        {"size": {"height": 10, "width": 10}, "crop_size": {"height": 8, "width": 8}, "do_center_crop": True},
        {"image_std": [0, 1, 1]}, {"image_mean": "x"},
    ],
)  # fmt: skip
def test_a_processor_that_cannot_be_declared_exactly_is_not_declared_and_is_reported(
    take: Take, tmp_path: Path, said: dict[str, Any]
) -> None:
    model = only(take(image_export(tmp_path / "m", said)))
    assert model.state == "taken"
    assert any("preprocessor_config.json is not declared" in note for note in model.notes)
    assert lay_over(read_model_keys(Path(model.folder) / "model.toml"), {}, "").input == {}


# ---- OpenVINO Model Server ------------------------------------------------------------------------------------------


def model_server(folder: Path, **more: Any) -> Path:
    """Two models and a configuration that names them as in its container, one of them by a relative path."""
    onnx_models.mlp(folder / "onnx_mlp" / "1")
    ir_models.from_onnx(folder / "onnx_mlp" / "1" / "model.onnx", folder / "ir_mlp" / "3", "ir_model.xml")
    models = [
        {"config": {"name": "ovms_onnx", "base_path": "/opt/ml/models/onnx_mlp", "batch_size": "auto", "nireq": 2}},
        {"config": {
            "name": "ovms_ir", "base_path": "ir_mlp", "target_device": "CPU", "layout": "NC",
            "plugin_config": {"PERFORMANCE_HINT": "LATENCY"}, "model_version_policy": {"latest": {"num_versions": 1}},
        }},
    ]  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"model_config_list": models, **more}))
    return folder


def test_the_models_of_a_model_server_answer(served: Runtime) -> None:
    for name in ("ovms_onnx", "ovms_ir"):
        assert np.allclose(served.infer(name, {"x": ROW}).outputs["y"], expected(), atol=1e-4)


def test_a_pipeline_of_a_model_server_answers(served: Runtime) -> None:
    assert np.allclose(served.infer("chain", {"features": ROW}).outputs["scores"], expected(), atol=1e-4)


def test_the_options_of_a_model_server_are_settings_or_reported(take: Take, tmp_path: Path) -> None:
    first, second = take(model_server(tmp_path / "m") / "config.json").models
    settings = lay_over(read_model_keys(Path(first.folder) / "model.toml"), {}, "")
    assert settings.instances == 2
    assert any(note.startswith("batch_size = 'auto'") for note in first.notes)
    settings = lay_over(read_model_keys(Path(second.folder) / "model.toml"), {}, "")
    assert settings.versions.latest == 1
    assert settings.options == {"openvino.PERFORMANCE_HINT": "LATENCY"}
    assert any(note.startswith("layout = 'NC': is not applied") for note in second.notes)
    assert "3/model.xml" in second.files


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"base_path": "s3://bucket/m"}, "in a cloud"),
        ({"base_path": "/opt/gone"}, "names a path in a container"),
        ({"base_path": "../.."}, "not a path below"),
        ({"base_path": "onnx_mlp", "stateful": True}, "stateful"),
        ({"base_path": "onnx_mlp", "custom_loader_options": {"loader_name": "x"}}, "custom loader"),
        ({"base_path": "empty"}, "holds no version"),
    ],
)
def test_a_setting_that_only_a_model_server_can_follow_is_refused_by_name(
    take: Take, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    folder = model_server(tmp_path / "m")
    (folder / "empty").mkdir()
    (folder / "config.json").write_text(json.dumps({"model_config_list": [{"config": {"name": "m", **config}}]}))
    model = only(take(folder))
    assert (model.name, model.state) == ("m", "refused")
    assert said in model.reason


NODE = {
    "name": "first", "model_name": "ovms_onnx", "type": "DL model",
    "inputs": [{"x": {"node_name": "request", "data_item": "features"}}],
    "outputs": [{"data_item": "y", "alias": "found"}],
}  # fmt: skip
DAG = {
    "name": "chain", "inputs": ["features"], "nodes": [NODE],
    "outputs": [{"scores": {"node_name": "first", "data_item": "found"}}],
}  # fmt: skip


def test_a_pipeline_of_a_model_server_becomes_pipeline_toml(take: Take, tmp_path: Path) -> None:
    tomllib = pytest.importorskip("tomllib")
    report = take(model_server(tmp_path / "m", pipeline_config_list=[DAG]))
    model = report.models[-1]
    assert (model.name, model.state) == ("chain", "taken"), model.reason
    assert tomllib.loads((Path(model.folder) / "pipeline.toml").read_text()) == {
        "step": [{"name": "first", "model": "ovms_onnx", "inputs": {"x": "input.features"}}],
        "output": {"scores": "first.y"},
    }


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"type": "custom", "library_name": "ocr"}, "custom node"),
        ({"demultiply_count": 0}, "map ="),
        ({"inputs": [{"x": {"node_name": "request", "data_item": "other"}}]}, "none of its inputs"),
        ({"outputs": []}, "has no output found"),
        ({"model_name": "gone"}, "gone, which is not in the source"),
    ],
)
def test_a_pipeline_that_does_not_fit_is_refused_by_name(
    take: Take, tmp_path: Path, node: dict[str, Any], said: str
) -> None:
    dag = {**DAG, "nodes": [{**NODE, **node}]}
    report = take(model_server(tmp_path / "m", pipeline_config_list=[dag], mediapipe_config_list=[{"name": "g"}]))
    *models, pipeline, graph = report.models
    assert [model.state for model in models] == ["taken", "taken"]
    assert pipeline.state == "refused"
    assert said in pipeline.reason
    assert "calculators" in graph.reason

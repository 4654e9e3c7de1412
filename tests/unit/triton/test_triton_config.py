"""A config.pbtxt: each field of Triton's ModelConfig, its checks and texts, and ensembles as pipelines."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from tritonclient.grpc import model_config_pb2

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import ConfigError, DecodeFailed, Unsupported
from edge_runtime.extras import install_advice
from edge_runtime.models.walk import scan
from edge_runtime.pipelines.definition import Place
from edge_runtime.triton import config as triton_config
from edge_runtime.triton.config import TritonConfig, read_config_file, read_config_json
from tests.models import onnx_models
from tests.models.triton_repository import DENSENET

TENSORS = 'input [{name: "x" data_type: TYPE_FP32 dims: [16]}] output [{name: "y" data_type: TYPE_FP32 dims: [4]}]'


def config_of(tmp_path: Path, text: str, name: str = "m") -> TritonConfig:
    file = tmp_path / "config.pbtxt"
    file.write_text(text)
    return read_config_file(file, name)


def settings_of(tmp_path: Path, text: str) -> ModelSettings:
    return msgspec.convert(dict(config_of(tmp_path, text).settings), ModelSettings)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, text)
    assert caught.value.message.startswith(f"{tmp_path}/config.pbtxt: ")
    return caught.value.message.partition(": ")[2]


def test_each_field_of_a_model_config_is_taken_noted_or_refused():
    fields = set(model_config_pb2.ModelConfig.DESCRIPTOR.fields_by_name)
    tables = [set(triton_config._TAKEN), set(triton_config._MEANINGLESS), set(triton_config._REFUSED)]
    assert set().union(*tables) == fields
    assert sum(map(len, tables)) == len(fields)


def test_the_example_of_tritons_quickstart_is_read(tmp_path):
    config = config_of(tmp_path, DENSENET, "densenet_onnx")
    assert config.backend == "onnxruntime"
    (given,) = config.interface.inputs
    assert (given.shape, given.inner_shape) == ((3, 8, 8), (1, 3, 8, 8))
    assert config.label_files == {"fc6_1": "densenet_labels.txt"}
    assert config.settings == {"batch": False}
    assert config.notes == ("data_0.format: the dims say where the channels are",)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("max_batch_size: 8", "max_batch_rows", 8),
        ("max_batch_size: 8", "batch", True),
        (TENSORS, "batch", False),
        ("", "batch", None),
        ("version_policy: { all {} }", "versions.all", True),
        ("version_policy { latest { num_versions: 3 } }", "versions.latest", 3),
        ("version_policy { specific { versions: [1, 3] } }", "versions.specific", (1, 3)),
        ("max_batch_size: 8 dynamic_batching { preferred_batch_size: [4, 8] }", "preferred_batch_rows", (4, 8)),
        ("dynamic_batching { max_queue_delay_microseconds: 250 }", "max_queue_delay_ms", 0.25),
        ("dynamic_batching { }", "queue", None),
        ("instance_group [{count: 2 kind: KIND_CPU}, {count: 1 kind: KIND_GPU}]", "instances", 3),
        ('backend: "python"', "backend", "python"),
        ('backend: "onnxruntime"', "backend", None),
        ("optimization { graph { level: -1 } }", "options", {"onnxruntime.optimization": "basic"}),
        ("optimization { graph { level: 1 } }", "options", {"onnxruntime.optimization": "extended"}),
        (
            'backend: "onnxruntime" parameters [{key: "intra_op_thread_count" value: {string_value: "2"}}]',
            "threads",
            2,
        ),
        (
            (
                'max_batch_size: 4 model_warmup [{name: "s" batch_size: 2 count: 3 '
                'inputs {key: "x" value: {data_type: TYPE_FP32 dims: [7] zero_data: true}}}]'
            ),
            "warmup",
            msgspec.convert({"runs": 3, "rows": [2], "shapes": {"x": [7]}}, type(ModelSettings().warmup)),
        ),
    ],
)
def test_a_field_becomes_a_setting(tmp_path, text, key, value):
    found = settings_of(tmp_path, text)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_queue_policies_become_a_queue_with_tritons_semantics(tmp_path):
    text = """
    max_batch_size: 8
    dynamic_batching {
      priority_levels: 2
      default_priority_level: 2
      default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1500 max_queue_size: 10 }
      priority_queue_policy { key: 1 value: { allow_timeout_override: true } }
    }
    """
    queue = settings_of(tmp_path, text).queue
    assert queue is not None
    assert (queue.levels, queue.default_level, queue.keep_order) == (2, 2, False)
    assert (queue.default.on_timeout, queue.default.timeout_ms) == ("delay", 1.5)
    assert queue.default.max_requests == 10
    assert queue.policy_of(1).allow_override
    assert queue.policy_of(1).on_timeout == "reject"


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("response_cache { enable: true }", "response_cache: no answer is kept"),
        ("instance_group [{gpus: [0] kind: KIND_GPU}]", "instance_group[0].gpus: "),
        ('metric_tags {key: "a" value: "b"}', "metric_tags: "),
        ('cc_model_filenames {key: "8.6" value: "a.plan"}', "cc_model_filenames: "),
        ("optimization { cuda { graphs: true } }", "optimization.cuda: "),
        (
            'optimization { execution_accelerators { gpu_execution_accelerator: [{name: "tensorrt"}] } }',
            "optimization.execution_accelerators.gpu_execution_accelerator.tensorrt: ",
        ),
        (
            'backend: "openvino" parameters {key: "NUM_STREAMS" value: {string_value: "2"}}',
            "parameters.NUM_STREAMS: ",
        ),
    ],
)
def test_a_field_that_has_no_meaning_here_is_noted_by_name(tmp_path, text, note):
    (found,) = config_of(tmp_path, text).notes
    assert found.startswith(note)


def test_a_feature_that_is_not_asked_for_is_not_noted(tmp_path):
    assert config_of(tmp_path, "response_cache { enable: false }").notes == ()
    text = 'parameters {key: "metadata" value: {string_value: "{}"}}'
    assert config_of(tmp_path, text).notes == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name: "other"', "unexpected directory name 'm' for model 'other', directory name must equal model name"),
        ("max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
        ("max_batch_size: 8 max_batch_size", "1:"),
        ("no_such_field: 1", 'has no field named "no_such_field"'),
        ("max_batch_size: 1e99", "1:17:"),
        ('backend: "dali"', "unable to find backend library for backend 'dali'"),
        ('platform: "caffe2_netdef"', "unexpected platform type 'caffe2_netdef' for m"),
        (
            'platform: "tensorrt_plan" backend: "onnxruntime"',
            "unexpected 'platform' and 'backend' pair, got:tensorrt_plan, onnxruntime",
        ),
        ("input [{data_type: TYPE_FP32 dims: [1]}]", "model input must specify 'name' for m"),
        ('input [{name: "x" dims: [1]}]', "model input 'x' must specify 'data_type' for m"),
        ('output [{name: "y" data_type: TYPE_FP32}]', "model output 'y' must specify 'dims' for m"),
        (
            'input [{name: "x" data_type: TYPE_FP32 dims: [0]}]',
            "model input 'x' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
        ),
        (
            'input [{name: "x" data_type: TYPE_FP32 dims: [4] reshape {shape: [2, 3]}}]',
            "model input 'x' has different size for dims and reshape for m",
        ),
        (
            'input [{name: "x" data_type: TYPE_FP32 dims: [4, -1] reshape {shape: [4]}}]',
            "model input 'x' has different number of variable-size dimensions for dims and reshape for m",
        ),
        (
            'input [{name: "x" data_type: TYPE_FP32 dims: [1] reshape {}}]',
            "model input 'x' cannot have empty reshape for non-batching model as scalar tensors are not supported",
        ),
        (
            "max_batch_size: 2 dynamic_batching { preferred_batch_size: [4] }",
            "dynamic batching preferred size must be <= max batch size for m",
        ),
        (
            "dynamic_batching { priority_levels: 2 }",
            "default priority level must be in range [1, 2] for m",
        ),
        (
            "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            ("dynamic_batching { preserve_ordering: true default_queue_policy "
            "{ timeout_action: DELAY default_timeout_microseconds: 1 } }"),
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
        (
            "instance_group [{kind: KIND_CPU gpus: [0]}]",
            "has kind KIND_CPU but specifies one or more GPUs",
        ),
        ("sequence_batching { iterative_sequence: true }", "sequence_batching.iterative_sequence of m"),
        ('model_repository_agents { agents [{name: "checksum"}] }', "model_repository_agents: whom to trust"),
        ('model_operations { op_library_filename: ["a.so"] }', "model_operations: a library of operators is code"),
    ],
)  # fmt: skip
def test_a_config_that_triton_refuses_or_would_answer_otherwise_is_refused_by_name(tmp_path, text, words):
    assert words in refusal(tmp_path, text)


def test_a_config_without_bounds_is_refused_soon(tmp_path):
    assert "has over 262144 characters" in refusal(tmp_path, "#" * 300_000)
    steps = 'step {model_name: "a" input_map {key: "x" value: "y"} output_map {key: "z" value: "w"}}' * 200
    text = f'platform: "ensemble" ensemble_scheduling {{ {steps} }}'
    assert "ensemble 'm' has 200 steps, at most 128 are run" in refusal(tmp_path, text)
    twice = 'input [{name: "x" data_type: TYPE_FP32 dims: [1]}]' * 2
    assert "model input 'x' is declared 2 times for m" in refusal(tmp_path, twice)
    groups = "instance_group [{passive: true}]" * 30
    assert config_of(tmp_path, groups).notes[-1] == "and 10 more fields have no meaning here"


def test_a_reshape_between_open_dimensions_is_as_triton_takes_it(tmp_path):
    text = 'input [{name: "x" data_type: TYPE_FP32 dims: [2, 4, -1, 6] reshape {shape: [8, -1, 1, 6]}}]'
    assert config_of(tmp_path, text).interface.inputs[0].inner_shape == (8, -1, 1, 6)


def test_a_scalar_a_row_is_an_empty_reshape(tmp_path):
    text = 'max_batch_size: 2 input [{name: "x" data_type: TYPE_FP32 dims: [1] reshape {}}]'
    assert config_of(tmp_path, text).interface.inputs[0].inner_shape == (-1,)


def test_without_protobuf_the_model_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "edge_runtime.protobufs", None)
    text = "# read nowhere else, so not known yet"
    assert f"config.pbtxt needs protobuf; {install_advice('triton')}" in refusal(tmp_path, text)


def test_the_config_of_a_load_is_read_by_the_same_table():
    config = read_config_json({"max_batch_size": 4, "dynamicBatching": {"maxQueueDelayMicroseconds": "250"}}, "m")
    assert config.settings == {"max_batch_rows": 4, "batch": True, "max_queue_delay_ms": 0.25}
    assert read_config_json({"max_batch_size": 0}, "m").settings == {"batch": False}
    with pytest.raises(Unsupported, match="iterative_sequence"):
        read_config_json({"sequence_batching": {"iterative_sequence": True}}, "m")
    with pytest.raises(DecodeFailed, match="no_such_field"):
        read_config_json({"no_such_field": 1}, "m")


def test_the_config_comes_whole_with_64_bits_as_numbers_and_enums_by_name(tmp_path):
    config = config_of(tmp_path, 'max_batch_size: 2 dynamic_batching {} instance_group [{}] parameters {key: "a"}')
    assert config.config["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    assert config.config["instance_group"][0]["kind"] == "KIND_AUTO"
    assert config.config["parameters"] == {"a": {"string_value": ""}}
    assert "version_policy" not in config.config


# ---- ensembles

ENSEMBLE = """
name: "m"
platform: "ensemble"
max_batch_size: 4
input [{name: "IMAGE" data_type: TYPE_STRING dims: [1]}]
output [
  {name: "CLASSIFICATION" data_type: TYPE_FP32 dims: [1000]},
  {name: "SEGMENTATION" data_type: TYPE_FP32 dims: [3, 224, 224]}
]
ensemble_scheduling {
  step [
    {
      model_name: "image_preprocess_model"
      model_version: -1
      input_map {key: "RAW_IMAGE" value: "IMAGE"}
      output_map {key: "PREPROCESSED_OUTPUT" value: "preprocessed_image"}
    },
    {
      model_name: "classification_model"
      model_version: 3
      input_map {key: "FORMATTED_IMAGE" value: "preprocessed_image"}
      output_map {key: "CLASSIFICATION_OUTPUT" value: "CLASSIFICATION"}
    },
    {
      model_name: "segmentation_model"
      model_version: -1
      input_map {key: "FORMATTED_IMAGE" value: "preprocessed_image"}
      output_map {key: "SEGMENTATION_OUTPUT" value: "SEGMENTATION"}
    }
  ]
}
"""
"""The example of Triton's page on ensembles."""


def test_tritons_example_of_an_ensemble_is_a_pipeline(tmp_path):
    pipeline = config_of(tmp_path, ENSEMBLE).chain
    assert pipeline is not None
    assert pipeline.levels == (("image_preprocess_model",), ("classification_model", "segmentation_model"))
    assert pipeline.outputs == {
        "CLASSIFICATION": Place("classification_model", "CLASSIFICATION_OUTPUT"),
        "SEGMENTATION": Place("segmentation_model", "SEGMENTATION_OUTPUT"),
    }
    assert pipeline.step("image_preprocess_model").inputs == {"RAW_IMAGE": Place("input", "IMAGE")}
    assert [step.version for step in pipeline.steps] == [None, 3, None]
    assert (pipeline.inputs["IMAGE"].datatype, pipeline.inputs["IMAGE"].shape) == ("BYTES", (-1, 1))
    assert pipeline.max_batch_rows == 4


def chain(*steps: tuple[str, str, str], given="a", wanted="c", extra="") -> str:
    text = f'platform: "ensemble" input [{{name: "{given}" data_type: TYPE_FP32 dims: [1]}}] '
    text += f'output [{{name: "{wanted}" data_type: TYPE_FP32 dims: [1]}}] ensemble_scheduling {{'
    for model, read, written in steps:
        text += f' step {{model_name: "{model}" input_map {{key: "x" value: "{read}"}} '
        text += f'output_map {{key: "y" value: "{written}"}}}}'
    return text + "}" + extra


def test_two_steps_of_one_model_have_names_of_their_own(tmp_path):
    pipeline = config_of(tmp_path, chain(("v1.2", "a", "b"), ("v1.2", "b", "c"))).chain
    assert pipeline is not None
    assert [(step.name, step.model) for step in pipeline.steps] == [("v1_2", "v1.2"), ("v1_2_2", "v1.2")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (chain(), "must specify 'step' for ensemble 'm'"),
        (chain(("", "a", "c")), "must specify 'model_name' in step 0 of ensemble 'm'"),
        (
            chain(("f", "a", "c"), ("g", "a", "c")),
            "ensemble tensor 'c' can appear in an output map only once for ensemble 'm' step 1",
        ),
        (chain(("f", "b", "c")), "ensemble input 'a' for ensemble m' is not used"),
        (chain(("f", "a", "b")), "ensemble output 'c' for ensemble m' is not used"),
        (
            chain(("f", "a", "c"), ("g", "d", "e"), ("h", "e", "d")),
            "ensemble tensor 'd' is unused in ensemble 'm'",
        ),
        (
            chain(("f", "a", "e"), ("g", "d", "c")),
            "output 'c' for ensemble 'm' is not written: at least one of its depending tensors, 'd', is not connected",
        ),
        (chain(("f", "a", "c"), ("g", "a", "b")), "ensemble tensor 'b' is unused in ensemble 'm'"),
        (
            chain(("f", "a", "c"), extra="instance_group [{}]"),
            "instance group should not be specified for ensemble 'm'",
        ),
        (
            chain(("f", "a", "c"), extra="optimization {}"),
            "optimization should not be specified for ensemble 'm'",
        ),
        (
            chain(("f", "a", "c"), extra='backend: "python"'),
            "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
        ),
        ('platform: "ensemble"', "ensemble scheduling must be set for ensemble m whose platform is ensemble"),
        (
            "ensemble_scheduling {}",
            "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
        ),
    ],
)  # fmt: skip
def test_an_ensemble_that_triton_refuses_is_refused_in_its_words(tmp_path, text, words):
    assert words in refusal(tmp_path, text)


# ---- in the models folder


def put(root: Path, **files: str) -> None:
    for name, text in files.items():
        file = root / "m" / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_of_a_key_in_both_files_model_toml_says(tmp_path):
    config = "max_batch_size: 8 dynamic_batching {max_queue_delay_microseconds: 500}"
    put(tmp_path, config_dot_pbtxt=config, model_dot_toml="max_queue_delay_ms = 2.0", **{"1__model_dot_onnx": "x"})
    model = scan(tmp_path).models["m"]
    assert (model.settings.max_batch_rows, model.settings.max_queue_delay_ms) == (8, 2.0)
    assert model.config is not None


def test_a_config_that_cannot_be_used_is_the_models_problem(tmp_path):
    put(tmp_path, config_dot_pbtxt="nonsense", **{"1__model_dot_onnx": "x"})
    found = scan(tmp_path)
    assert "nonsense" in str(found.models["m"].settings_error)
    assert [(each.path.name, each.model) for each in found.problems] == [("config.pbtxt", "m")]


def test_a_number_that_no_word_stands_for_is_refused_with_the_words(tmp_path):
    text = "dynamic_batching { default_queue_policy { timeout_action: 7 } }"
    assert "timeout_action: got 7, wanted one of REJECT, DELAY" in refusal(tmp_path, text)


def test_a_fault_that_no_reader_foresaw_costs_its_model_alone(tmp_path, monkeypatch):
    onnx_models.mlp(tmp_path / "good" / "1")
    (tmp_path / "bad" / "1").mkdir(parents=True)
    (tmp_path / "bad" / "config.pbtxt").write_text(TENSORS)
    monkeypatch.setattr(triton_config, "read_config_file", lambda path, _: len(path, path))
    found = scan(tmp_path)
    assert set(found.models) == {"good"}
    (problem,) = found.problems
    assert problem.model == "bad"
    assert "cannot be read: TypeError" in problem.reason


def test_a_changed_config_is_read_again_and_an_unchanged_one_is_not(tmp_path):
    put(tmp_path, config_dot_pbtxt="max_batch_size: 8", **{"1__model_dot_onnx": "x"})
    before = scan(tmp_path)
    assert scan(tmp_path, before).models["m"].config is before.models["m"].config
    put(tmp_path, config_dot_pbtxt="max_batch_size: 16")
    assert scan(tmp_path, before).models["m"].settings.max_batch_rows == 16
    (tmp_path / "m" / "config.pbtxt").unlink()
    assert scan(tmp_path, before).models["m"].settings == ModelSettings()


@pytest.mark.parametrize(
    ("config", "file", "name"),
    [
        ('backend: "onnxruntime" default_model_filename: "resnet.bin"', "resnet.bin", "model.onnx"),
        ('default_model_filename: "best.onnx"', "best.onnx", "model.onnx"),
        ('backend: "python" default_model_filename: "classify.py"', "classify.py", "model.py"),
        ('platform: "pytorch_libtorch" default_model_filename: "traced.zip"', "traced.zip", "model.pt"),
        ('backend: "onnxruntime"', "model.onnx/model.onnx", "model.onnx"),
        ('platform: "tensorflow_savedmodel"', "model.savedmodel/saved_model.pb", "saved_model.pb"),
        ('platform: "tensorflow_savedmodel" default_model_filename: "net"', "net/saved_model.pb", "saved_model.pb"),
    ],
)
def test_the_file_that_the_config_names_is_the_artifact(tmp_path, config, file, name):
    place = tmp_path / "m" / "1" / file
    place.parent.mkdir(parents=True)
    place.write_text("x")
    (tmp_path / "m" / "1" / "other.onnx").write_text("x")
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    found = scan(tmp_path)
    assert found.models["m"].versions[1].files[name] == place
    (tmp_path / "m" / "config.pbtxt").write_text("")
    assert scan(tmp_path, found).models["m"].versions == scan(tmp_path).models["m"].versions

"""OpenVINO GenAI: writes text with a language model in OpenVINO's format, many answers at once."""

from edge_runtime.backends.declaration import Declaration

BACKEND = Declaration(
    name="openvino-genai",
    factory="edge_runtime.backends.openvino_genai.backend:OpenVinoGenaiBackend",
    artifacts=("openvino_model.xml",),
    beside=("openvino_tokenizer.xml", "openvino_detokenizer.xml"),
    data=(
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
    ),
    libraries=("openvino_genai",),
    extra="llm",
    load_cost=2,
    why_one_run="one step of its engine writes a token for every answer",
    runs_ahead=True,
    prepare="edge_runtime.backends.openvino_genai.backend:prepare_openvino_genai",
    sees="folder",
    chain="edge_runtime.language.generation:make_generation",
    tuner="edge_runtime.language.budget:choose_budget",
    tuned_table="language",
)

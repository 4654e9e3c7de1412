"""The line of a language model in `edge-runtime status`."""

from __future__ import annotations

from edge_runtime.language.status_lines import status_fields


def test_each_language_model_has_a_line_of_its_numbers_and_others_have_none() -> None:
    words = {
        "streams": 3, "queue_rows": 2, "kv_used_tokens": 412, "kv_total_tokens": 8192, "prefill_tokens_s": 1900.4,
        "step_ms": 6.21, "first_token_ms": 92.3,
    }  # fmt: skip

    told = status_fields({"metrics": {"models": {"words": words, "pictures": {"queue_rows": 0}}}})

    assert told == {
        "words": "3 streams, 2 waiting, cache 412 of 8,192 tokens, reads 1,900 tokens/s, step 6.2 ms, first token 92 ms"
    }


def test_model_without_steps_so_far_says_what_is_known() -> None:
    assert status_fields({"metrics": {"models": {"words": {"streams": 1, "kv_total_tokens": 0}}}}) == {
        "words": "1 stream, 0 waiting"
    }


def test_stats_of_a_daemon_without_metrics_have_no_line() -> None:
    assert status_fields({}) == {}

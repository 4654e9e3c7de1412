"""Signed updates: fetch from an untrusted place, verify with TUF, keep durably. Nothing here loads or serves a model.

`fetch` (with `http_fetch`, `folder_fetch`) moves bytes within bounds; `download` and `store` keep them; `trust` decides
what is to be believed and does no I/O; `tuf_client` is the workflow over all of them; `tuf_cli` drives it by hand.
"""

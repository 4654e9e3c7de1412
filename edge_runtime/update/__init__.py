"""Signed updates: fetch from an untrusted place, verify with TUF, keep durably, try, swap, observe, commit.

| part | modules |
|---|---|
| TUF client and trust | trust (no I/O), tuf_client, tuf_cli, device_time, repository_view |
| fetching | fetch, http_fetch, source, download, store |
| memory | journal, states, active |
| rollout | release_checks, staging, releases, trial, rollout, rollout_progress, observation |
| the device | updater (one check), worker (its thread), report |

`worker.UpdateWorker` is the way in; the daemon makes it only where `[update]` is configured.
"""

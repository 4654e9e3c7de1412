"""Starts pyzmq's thread for lent buffers, once for the process, so that the leak check blames no test for it.

Import it for that effect. pyzmq starts the thread when the first buffer is lent; started twice, the second one fails.
"""

from __future__ import annotations

from zmq.utils.garbage import gc

if gc.thread is None:
    gc.start()

"""Fill one bucket while another one is sent."""

import queue
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_a3po.weights.plan import Bucket


class DoubleBuffer:
    """Buffers that alternate between the caller, who fills them, and a thread that sends them. For one publication."""

    def __init__(
        self, send: Callable[[Bucket, Tensor], None], buffer_bytes: int, device: torch.device, *, num_buffers: int
    ) -> None:
        """send: called in the thread with each bucket and its bytes. buffer_bytes: of each buffer."""
        self._send = send
        self._device = device
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[tuple[Bucket, Tensor] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        for _ in range(num_buffers):
            self._free.put(torch.empty(buffer_bytes, dtype=torch.uint8, device=device))
        self._thread = threading.Thread(target=self._run, name="weight sender", daemon=True)
        self._thread.start()

    def take_buffer(self) -> Tensor | None:
        """Wait for a free buffer [buffer_bytes] uint8 and return it; None when sending has failed."""
        buffer = self._free.get()
        if self._error is None:
            return buffer
        self._free.put(buffer)  # for the next call, which must not block
        return None

    def put(self, bucket: Bucket, buffer: Tensor) -> None:
        """Have the bucket's bytes at the start of `buffer` sent, in the order of the calls."""
        self._filled.put((bucket, buffer))

    def finish(self) -> None:
        """Wait until everything is sent. Raises what `send` has raised."""
        self._filled.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread starts on the first device
        while (item := self._filled.get()) is not None:
            bucket, buffer = item
            try:
                if self._error is None:
                    self._send(bucket, buffer[: bucket.nbytes])
            except BaseException as error:
                self._error = error
            self._free.put(buffer)

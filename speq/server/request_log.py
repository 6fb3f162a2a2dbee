"""A line of log for each request, once it is over."""

import logging

from speq.engine.engine_thread import STOPPED, Observer
from speq.engine.token_stream import End, TokenStream
from speq.errors import SpeqError

logger = logging.getLogger("speq")


class RequestLog(Observer):
    """Says how long a request waited, what it took, and why it ended. No text of it is told."""

    def on_end(self, stream: TokenStream, end: End | SpeqError) -> None:
        count = len(stream.request.prompt_token_ids)
        if isinstance(end, SpeqError):
            logger.info("a request with %d tokens failed: %s", count, end)
        elif end.finish_reason == STOPPED:
            made = len(stream.request.output_token_ids)
            logger.info("a request with %d tokens was cancelled after %d more", count, made)
        else:
            logger.info("%s", told(count, end))


def told(prompt_tokens: int, end: End) -> str:
    """The figures of a whole answer, in a line."""
    stats = end.stats
    parts = [
        f"{stats['new_tokens']} tokens after {prompt_tokens} ({stats['cached_tokens']} reused)",
        f"the first after {stats['ttft_ms'] / 1e3:.2f} s, of which {end.queued_s:.2f} s queued",
    ]
    if stats["tpot_ms"]:
        parts.append(f"{1e3 / stats['tpot_ms']:.1f} tokens/s")
    waited_s = stats["stall_s"] + stats["prefill_stall_s"]
    parts.append(f"{waited_s:.2f} s waited for experts")
    return f"{'; '.join(parts)}; {end.finish_reason}"

"""The section ``custom.extra.rollout_server.limits``: what one caller may cost a rollout server."""

from rollmatch.config.section import Count, Positive, Section


class LimitsConfig(Section):
    """Limits of one call and one connection to the rollout server; a call above one of them is refused."""

    max_connections: Count = 1024
    """Open connections; the server answers further ones with 429. Unit: connections."""
    head_timeout_s: Positive = 10.0
    """Time for a request line and its headers to arrive; later, the connection is closed. Unit: seconds."""
    idle_timeout_s: Positive = 30.0
    """Time that a connection may stay open between two calls, and longest pause within a body. Unit: seconds."""
    max_body_bytes: Count = 268_435_456
    """Body of one call. Unit: bytes."""
    max_buffered_bytes: Count = 1_073_741_824
    """Bodies of all running calls together; a call above it is answered with 429. Unit: bytes."""
    max_waiting_responses: Count = 65_536
    """Responses that run or wait on all engines; a call above it is answered with 429. Unit: responses."""
    max_prompts_per_call: Count = 8_192
    """Prompts of one call. Unit: prompts."""
    max_responses_per_prompt: Count = 1_024
    """Responses to one prompt (n). Unit: responses."""
    max_responses_per_call: Count = 16_384
    """Responses to all prompts of one call. Unit: responses."""
    max_tokens_per_call: Count = 4_194_304
    """Prompt tokens of one call, each prompt counted once. Unit: tokens."""
    max_text_bytes: Count = 1_048_576
    """Text of one prompt before it is tokenised, with the chat template around it. Unit: bytes."""
    max_images_per_call: Count = 8_192
    """Images of all prompts of one call. Unit: images."""
    max_pixels_per_image: Count = 67_108_864
    """Width times height of one image, read from its header before it is decoded. Unit: pixels."""
    max_pixels_per_call: Count = 536_870_912
    """Pixels of all images of one call; a decoded pixel takes 4 bytes, and about 10 while an
    engine prepares it. Unit: pixels."""
    max_decoded_pixels: Count = 536_870_912
    """Pixels of the decoded images of all running calls; a call above it is answered with 429. Unit: pixels."""
    max_logprobs_per_call: Count = 1_048_576
    """Log-probabilities of one call: responses x longest response x likeliest tokens at each place (logprobs,
    top_logprobs), where a call asks for any beside the sampled token's. Unit: log-probabilities."""
    max_waiting_logprobs: Count = 1_048_576
    """The same of all calls that are being answered; a call above it is answered with 429. One takes up to 300 bytes.
    Unit: log-probabilities."""

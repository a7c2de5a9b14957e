"""Bodies with prompts for the server's routes, and its answers in short."""

import base64
import io

from PIL import Image

IMAGE = 414


def call(client, route, body):
    reply = client.post(route, json=body)
    returned = reply.json() if reply.status_code != 200 else {}
    return reply.status_code, returned.get("code"), returned.get("key")


def native(prompts, **fields):
    requests = [{"request_id": str(i), "prompt_token_ids": ids} | fields for i, ids in enumerate(prompts)]
    return {"requests": requests, "sampling": {"max_tokens": 1}}


def picture(width, height, kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


SAMPLING = {"max_tokens": 3}


def batch(*prompts, **fields):
    items = [{"request_id": str(i), "prompt_token_ids": list(ids)} for i, ids in enumerate(prompts)]
    return {"requests": items, "sampling": SAMPLING | fields}

"""Bodies of the native dialect's updates, for the server's application over pretending engines."""

FAILURE = {"code": "transfer-failed", "key": "broadcast", "problem": "peer is gone", "remedy": "again", "status": 409}
OPEN = {"client": "me", "host": "127.0.0.1", "port": 23000, "world_size": 3, "secret": "of this test's group"}


def full_sync(parts, **fields):
    tensors = [spec.model_dump(mode="json") for spec in parts.model.tensors.values()]
    sync_body = {"client": "me", "sync_id": "1", "version": 1, "tensors": tensors, "buckets": [len(tensors)]}
    return sync_body | {"digests": [f"{i:032x}" for i in range(len(tensors))]} | fields


def first_of(sync_body):
    return sync_body["tensors"][0]


def merging(name):
    return {"adapter": {"merges": [{"name": name, "lora_a": "a", "lora_b": "b", "scaling": 1}]}}


def calls_of(parts, method):
    return [call for replica in parts.pool.replicas for call in replica.calls if call[0] == method]


def generate(post):
    return post(
        "/native/infer/", {"requests": [{"request_id": "0", "prompt_token_ids": [5]}], "sampling": {"max_tokens": 2}}
    )

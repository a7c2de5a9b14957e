"""An environment of drawn runs, and its episodes, naively: what the policy wrote, what it heard, what it was paid."""

import random
import time
import zlib


class Echo:
    """Pays each turn by its text, after up to ``delay_s``; a turn with a 1, or the third, is the last."""

    def __init__(self, delay_s=0.0):
        self.delay_s = delay_s

    def reset(self, sample, rng):
        self.turns = 0
        return "go"

    def clone(self, rng):
        twin = Echo(self.delay_s)
        twin.turns = self.turns
        return twin

    def step(self, action):
        self.turns += 1
        time.sleep(self.delay_s * random.random())
        reward = zlib.crc32(action.encode()) % 8 / 7
        return "ok", reward, "1" in action or self.turns == 3, False

    def fingerprint(self):
        return self.turns


def play(words, first, next_turn, rules, *, turn_limit):
    """An episode from its first turn (ids, log-probabilities); ``next_turn(ids so far, number, limit)``: another one.

    Returns a completion's target, engine, written, reward, ended and num_tokens, of which stop tokens are none.
    """
    world, limit = Echo(), rules["max_response_tokens"]
    world.reset(None, None)
    (ids, logprobs), number = first, 0
    target, engine, written, paid, ended, num_tokens = [*ids], [*logprobs], [True] * len(ids), 0.0, False, 0
    while True:
        stopped = ids[-1:] == [words.stop]
        heard, reward, ended, _ = world.step(words.text(ids[:-1] if stopped else ids))
        paid, number, num_tokens = paid + reward, number + 1, num_tokens + len(ids) - stopped
        if ended or number == rules["max_turns"]:
            break
        if rules["observations"] == "chat":
            heard = f"<|im_end|>\n<|im_start|>user\n{heard}<|im_end|>\n<|im_start|>assistant\n"
        more = words.ids(heard)
        more = more[1:] if rules["observations"] == "chat" and stopped else more
        if len(target) + len(more) >= limit:
            break
        target, engine = target + more, engine + [0.0] * len(more)
        written += [False] * len(more)
        ids, logprobs = next_turn(target, number, min(turn_limit, limit - len(target)))
        target, engine, written = target + ids, engine + logprobs, written + [True] * len(ids)
    made = {"target": target, "engine": engine, "written": written, "reward": paid, "ended": ended}
    return made | {"num_tokens": num_tokens}

"""A server of an unmodified openenv-core: guess a number; as a program, at a port."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """A number."""

    message: int


class Told(Observation):
    """What is said to it."""

    text: str


class Guessing(Environment):
    """The number is 7 by the seed of the first episode, and three guesses are allowed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, secret=7, **others):
        self.secret, self.tries = secret, 0
        return Told(text="guess", done=False, reward=0.0)

    def step(self, action, **others):
        self.tries += 1
        if action.message == 13:
            raise RuntimeError("the table fell over")
        is_right = action.message == self.secret
        done = is_right or self.tries == 3
        return Told(text="right" if is_right else f"no ({self.tries})", done=done, reward=float(is_right))

    @property
    def state(self):
        return State(step_count=self.tries)


app = create_fastapi_app(Guessing, Guess, Told, max_concurrent_envs=64)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))

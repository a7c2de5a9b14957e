"""Reward functions of the tests: answers of one prompt differ in them."""


def digit_sum(answer, sample):
    """Of all coordinates: hardly ever the same for two answers."""
    return sum(int(character) for character in answer if character.isdigit()) / 10


def spelling(answer, sample):
    """Hardly ever the same for two answers, also where they have no digits."""
    return sum(map(ord, answer)) % 97 / 97


def num_digits(answer, sample):
    """The number of true names that stand in the answer."""
    return float(sum(truth.desc in answer for truth in sample.objects))

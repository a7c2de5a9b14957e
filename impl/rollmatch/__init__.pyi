from rollmatch.api import GRPOTrainer as GRPOTrainer
from rollmatch.api import VinePPOMCTSTrainer as VinePPOMCTSTrainer
from rollmatch.api import VinePPOTrainer as VinePPOTrainer
from rollmatch.api import train as train
from rollmatch.config import RunConfig as RunConfig
from rollmatch.config.load import load_config as load_config
from rollmatch.data import load_samples as load_samples
from rollmatch.dialects.session import ClientSettings as ClientSettings
from rollmatch.dialects.session import RolloutServer as RolloutServer
from rollmatch.dialects.trl.vllm_client import VLLMClient as VLLMClient
from rollmatch.environments.environment import ActionUnparsable as ActionUnparsable
from rollmatch.environments.environment import Environment as Environment
from rollmatch.errors import ErrorList as ErrorList
from rollmatch.errors import RollmatchError as RollmatchError
from rollmatch.learn.pack import Packer as Packer
from rollmatch.learn.pack import pack as pack
from rollmatch.model.vocabulary import Vocabulary as Vocabulary
from rollmatch.objectives.grpo.advantage import group_advantages as group_advantages
from rollmatch.objectives.grpo.reward import RewardFunction as RewardFunction
from rollmatch.objectives.rollout_matching.answer import parse_answer as parse_answer
from rollmatch.objectives.rollout_matching.answer_format import AnswerFormat as AnswerFormat
from rollmatch.objectives.rollout_matching.match import MatchRules as MatchRules
from rollmatch.objectives.rollout_matching.match import match_objects as match_objects
from rollmatch.objectives.rollout_matching.parse import parse_rollout as parse_rollout
from rollmatch.objectives.rollout_matching.target import append_missed as append_missed
from rollmatch.objectives.rollout_matching.target import serialize_objects as serialize_objects
from rollmatch.records import GroundTruth as GroundTruth
from rollmatch.records import Matching as Matching
from rollmatch.records import ParsedRollout as ParsedRollout
from rollmatch.records import PredictedObject as PredictedObject
from rollmatch.records import Rollout as Rollout
from rollmatch.records import Row as Row
from rollmatch.records import Sample as Sample
from rollmatch.records import Segment as Segment
from rollmatch.training.trainer import RolloutTrainer as RolloutTrainer

__version__: str
__all__: list[str]

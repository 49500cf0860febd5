from .ttt_ops import ttt_attention, ttt_read, ttt_update
from .ttt_rule import TTTRule
from .ttt_state import TTTState, ttt_init

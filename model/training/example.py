"""The commented configuration that `dragoman train --example` prints: every setting, its unit, and its default or rule."""

EXAMPLE = """\
# A training run: dragoman train THIS_FILE --data FOLDER --output CHECKPOINT
#
# Only [data] is needed. A setting that begins with # is left out here. Without it the value beside it is the default; where the
# line above says `rule`, the value is chosen by the size of the text when the run begins (the value here is an example). What was
# chosen is printed, and written with everything else to training/config.toml in the checkpoint, with which the run can be repeated.

# Of the model, as servers call it: small letters, digits, `.`, `_` and `-`. Without it, this file's name without `.toml`.
#name = "en-de"
# Folder of a checkpoint whose weights and vocabulary to go on from; what [model] leaves out is as there. Empty: random weights.
#initial_checkpoint = ""

# UTF-8 text, one sentence a line, line by line each other's translation; gunzipped where the name ends in .gz. A language model
# (architecture = "decoder") reads the target alone: leave out source and validation_source.
[data]
source = "train.en"
target = "train.de"
# Other sentences, never trained on: they decide which weights are kept. A few hundred to 2,000 lines; each is translated each time.
validation_source = "val.en"
validation_target = "val.de"

[tokenizer]
# Tokens, 3 special ones and 256 bytes included, learnt from both sides; at least 300.
# rule: 260 + 5·√(words of both sides), from 300 to 32,000
#vocab_size = 5000
# Probability that a merge is left out when training text is cut into tokens.
#bpe_dropout = 0.0

[model]
# "transformer"; "rnn", the recurrent encoder and decoder; or "decoder", a language model, which goes on with a text. Each has its
# own of the settings below: one that means nothing to it is refused.
#architecture = "transformer"
# Of an rnn, how a state scores the source's tokens: "additive", "dot", "scaled_dot"; "none" squeezes a source into one state.
#attention = "additive"
# Width of every layer.
# rule: 128, 128, 256, 512: up to 200,000 target tokens, 2 million, 20 million, beyond
#d_model = 128
# Attention heads; they divide d_model.
# rule: d_model / 64, at least 4; fewer where that does not divide d_model, or makes no heads that rotary positions go with
#num_heads = 4
# Width of all heads of a layer together, or of an rnn's additive attention. Without it: d_model.
#attention_dim = 128
# Layers.
# rule: 2, 4, 4, 6, of an rnn 1, 1, 2, 2: up to 200,000 target tokens, 2 million, 20 million, beyond
#num_encoder_layers = 4
#num_decoder_layers = 4
# Inner width of the feed-forward layers.
# rule: 4 · d_model
#encoder_ffn_dim = 512
#decoder_ffn_dim = 512
# Longest source and target that the model will ever take, in tokens, the special one included.
#max_source_positions = 512
#max_target_positions = 512
# Layer norm before ("pre") or after ("post") each sub-layer; "post" is the paper's and needs more warm-up.
# rule: pre
#norm = "pre"
# "layer": norms subtract the mean and have a bias; "rms": neither.
#norm_kind = "layer"
# A bias in each linear map of attention and feed-forward layers.
#has_biases = true
# "relu", "gelu", "gelu_tanh" or "silu"; whether a second linear map is multiplied by it.
#activation = "relu"
#is_ffn_gated = false
# Attention scores are divided by the square root of a head's width.
#is_attention_scaled = true
# "sinusoidal" or "learned" tables, and what is added to each position; "rotary", of a language model: queries and keys are turned
# by angles that grow with the position, and the base says how much more slowly each next one does; or "relative": biases of
# scores by distance (T5),
#positions = "sinusoidal"
#position_offset = 0
#rotary_base = 10000.0
# ... of which there are so many, that of the farthest begins here, and there may be a table for each layer.
#relative_buckets = 32
#relative_max_distance = 128
#has_relative_bias_per_layer = false
# One table of embeddings for both sides; the output projection is that table; embeddings are multiplied by √d_model.
#is_embedding_shared = true
#is_projection_tied = true
#is_embedding_scaled = true
# A layer norm behind the embeddings; a bias for each token of the output.
#has_embedding_norm = false
#has_output_bias = false
# What the decoder gives is divided by √d_model before the output projection.
#is_output_scaled = false
# Padding in answers: "excluded" from the softmax, "masked" behind it, or "predicted" as any token.
#padding = "excluded"
# Probability that a value is dropped while training: of embeddings and sub-layers' outputs,
# rule: 0.3, 0.2, 0.2, 0.1: up to 200,000 target tokens, 2 million, 20 million, beyond
#dropout = 0.2
# ... of attention weights, and inside feed-forward layers.
#attention_dropout = 0.0
#activation_dropout = 0.0
# Added to the variance in layer norms.
#norm_epsilon = 1e-5

[training]
# Steps after which training ends.
# rule: 75 epochs, at least 1,000 steps, at most 100,000
#max_steps = 10_500
# Size of a step's batch in tokens, padding included: rows times the longer of its longest source and target.
# rule: a hundredth of the text's tokens (each pair's longer side), at least 128 and 16 average pairs, at most 4096
#max_tokens = 4096
# Pairs with more tokens on a side are left out, and counted.
#max_length = 256
# The highest learning rate: reached after warmup_steps, then falling with 1/√step.
# rule: 1/√(d_model · warmup_steps), at most 0.003
#learning_rate = 3e-3
# Steps in which the rate rises.
# rule: a tenth of max_steps, at most 2,000
#warmup_steps = 1000
# Last steps, in which the rate also falls to zero.
# rule: a third of max_steps
#cooldown_steps = 3500
# Adam's decay of the first and second moment, and decoupled weight decay.
#adam_beta1 = 0.9
#adam_beta2 = 0.98
#weight_decay = 0.0
# Probability that is spread over the whole vocabulary instead of given to the right token.
#label_smoothing = 0.1
# Weight of the divergence between two passes over each batch (R-Drop); 0 for one pass, which takes half the time.
#r_drop = 0.0
# Longest gradient; a longer one is scaled down.
#max_grad_norm = 1.0
# Epochs from one validation to the next; each makes a checkpoint.
# rule: about 20 times in max_steps, at most once an epoch
#validate_every = 4
# Newest validated checkpoints whose mean is tried as the final model.
#average_last = 5
# Validations in a row without a better BLEU after which training ends; 0 goes on to max_steps.
#patience = 0
# Of initial weights, batches and what is dropped: the same seed gives the same run.
#seed = 1
# Compute in bfloat16: faster on GPUs, and on processors with avx512_bf16 or amx_bf16.
#is_bf16 = false
"""

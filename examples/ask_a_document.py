"""Ask the default model about a document, with the KV cache on disk. One argument of a usual script changes.

    python examples/ask_a_document.py [FILE] ["QUESTION"]
"""

import sys
from pathlib import Path

from hf_offload_cache import DiskSwapCache
from hf_offload_cache.console import build_prompt, load

document = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("document.txt")
question = sys.argv[2] if len(sys.argv) > 2 else "What is the access code of the north greenhouse?"

model, tokenizer = load()  # or any other causal language model of transformers
input_ids = build_prompt(tokenizer, document.read_text(encoding="utf-8"), question)

with DiskSwapCache(model, num_selected=400) as cache:
    output = model.generate(input_ids, past_key_values=cache, max_new_tokens=40, do_sample=False)
    print(tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True))
    print(cache.report())

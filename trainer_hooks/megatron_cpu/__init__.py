"""Megatron-core on CPUs, on one rank or several: for the demo, the tests and small experiments.

Megatron-core is written for CUDA. This package holds what it lacks on a machine without: see
`shim`, `modules`, `qwen3_moe` and `hf_weights`. On a GPU none of it is needed or imported.

    from r3.trainer_hooks.megatron_cpu.qwen3_moe import build_gpt_model, load_hf_weights
    from r3.trainer_hooks.megatron_cpu.shim import init_single_process

    init_single_process()
    model = build_gpt_model(AutoConfig.from_pretrained(folder))
    load_hf_weights(model, folder)
    logits = model(input_ids, position_ids, None)  # [b, s, vocabulary]

Of several ranks each calls `shim.init_ranks` with its number and the sizes of the layout, and
builds its part of the model with `qwen3_moe.build_model_chunks`.
"""

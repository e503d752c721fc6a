"""Megatron-core on CPUs, on one rank or several: for the demo, the tests and small experiments.

Megatron-core is written for CUDA. This package holds what it lacks on a machine without: see
`shim`, `modules`, `qwen3_moe` and `hf_weights`. On a GPU none of it is needed or imported.

    from r3.trainer_hooks.megatron_cpu.qwen3_moe import build_gpt_model, load_hf_weights
    from r3.trainer_hooks.megatron_cpu.shim import init_single_process

    init_single_process()
    model = build_gpt_model(AutoConfig.from_pretrained(folder))
    load_hf_weights(model, folder)
    logits = model(input_ids, position_ids, None)  # [b, s, vocabulary]

Of several ranks, each a process, each sets up its place and builds its part of the model, for
Megatron's schedules or for a loop of one's own:

    from pathlib import Path
    import torch
    from r3.trainer_hooks.megatron_cpu.qwen3_moe import build_model_chunks, load_hf_weights
    from r3.trainer_hooks.megatron_cpu.shim import init_ranks

    def main(rank, store):  # store: a file that does not exist yet, the same for all ranks
        init_ranks(Path(store), rank, 2, pp=2)
        chunks = build_model_chunks(config, recompute_granularity="full",
                                    recompute_method="uniform", recompute_num_layers=1)
        load_hf_weights(chunks, folder)
        ...

    if __name__ == "__main__":
        torch.multiprocessing.spawn(main, ("/tmp/meet-17",), nprocs=2)
"""

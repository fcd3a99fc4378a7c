"""One-line breakages, each of which a test of the default run must catch.

    python tests/mutations.py --list
    python tests/mutations.py free-head-first
    python tests/mutations.py --all            about half an hour on two cores

A mutation is applied to a copy of the repository, and the tests that should catch it are run
there, two mutations at a time; once also without any mutation, where they must pass. The exit
status is the number of mutations that survived.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NUM_AT_ONCE = 2  # test runs, each with one thread


class Mutation(NamedTuple):
    """In a file of the package `old`, which is there once, becomes `new`."""

    file: str
    old: str
    new: str
    tests: str


SHADOW = "tests/test_shadow_cache.py"
# fmt: off
MUTATIONS = {
    # ---- blocks
    "free-head-first": Mutation("block_allocator.py", "for block_id in reversed(block_ids):", "for block_id in block_ids:", SHADOW),
    "reuse-most-recent": Mutation("block_allocator.py", "popitem(last=False)", "popitem(last=True)", SHADOW),
    "keep-old-contents": Mutation("block_allocator.py", "            self._forget(block_id)\n", "", SHADOW),
    "match-last-token": Mutation("block_allocator.py", "len(token_ids) - self.block_size\n", "len(token_ids) - self.block_size + 1\n", SHADOW),
    "key-without-parent": Mutation("block_allocator.py", "            chain = self._chains[keys[-1]]\n", "", SHADOW),
    "half-full-blocks": Mutation("block_allocator.py", "num_full = num_computed // self.block_size\n        if num_full > len", "num_full = -(-num_computed // self.block_size)\n        if num_full > len", SHADOW),
    "no-salt": Mutation("block_allocator.py", "if keys else (\"salt\", salt)", "if keys else (\"salt\", None)", "tests/test_block_allocator.py"),
    "double-free": Mutation("block_allocator.py", "            if self.ref_count(block_id) == 0:\n                raise ValueError(\n                    f\"block {block_id} is free already", "            if self.ref_count(block_id) == -1:\n                raise ValueError(\n                    f\"block {block_id} is free already", "tests/test_block_allocator.py"),
    "allocate-too-many": Mutation("block_allocator.py", "        if n > self.num_free_blocks:", "        if n > self.num_free_blocks + 1:", "tests/test_block_allocator.py"),
    "acquire-leaves-free": Mutation("block_allocator.py", "            if self._ref_counts[block_id] == 0:\n                del self._freed[block_id]\n", "", SHADOW),
    "gone-keys-are-not-told": Mutation("block_allocator.py", "            del self._holders[key], self._chains[key]\n            self.key_changed(key)\n", "            del self._holders[key], self._chains[key]\n", "tests/policies/test_prefix_hits.py"),
    "hits-behind-a-gone-key": Mutation("policies/prefix_hits.py", "            while path[-1] != key:\n                self._unwatch(path.pop(), request)\n", "", "tests/policies/test_prefix_hits.py"),
    "hits-of-tokens-that-grew": Mutation("policies/prefix_hits.py", "if self._num_tokens.get(request) != num_tokens:", "if request not in self._num_tokens:", "tests/policies/test_prefix_hits.py"),
    "look-up-everybody": Mutation("policies/prefix_hits.py", "                self._stale[request] = None\n        if len", "            self._stale[request] = None\n        if len", "tests/policies/test_prefix_hits.py"),
    "outputs-share-a-list": Mutation("request.py", "make(source[:length])", "make(source)", "tests/test_engine.py"),
    # ---- scheduling
    "no-token-for-those-behind": Mutation("scheduler.py", "                num_tokens = min(num_tokens, budget - num_behind)\n            num_slots", "                num_tokens = min(num_tokens, budget)\n            num_slots", "tests/policies/test_policy.py"),
    "budget-not-given-back": Mutation("scheduler.py", "                    budget += num_given_back\n", "", "tests/policies/test_policy.py"),
    "admit-after-preemption": Mutation("scheduler.py", "        if not plan.preempted:\n", "        if True:\n", SHADOW),
    "admit-over-seats": Mutation("scheduler.py", "num_seats = config.max_num_seqs - len(self.running)", "num_seats = config.max_num_seqs - len(self.running) + 1", SHADOW),
    "victim-is-the-first": Mutation("scheduler.py", "victim = running[-1]", "victim = running[0]", SHADOW),
    "priority-victim": Mutation("scheduler.py", "victim = max(running", "victim = min(running", SHADOW),
    "victim-goes-last": Mutation("scheduler.py", "        self.batching.leave(request, self.running)\n        bisect.insort(self.waiting, request, key=arrival)\n", "        self.batching.leave(request, self.running)\n        self.waiting.append(request)\n", SHADOW),
    "trust-lost-copies": Mutation("scheduler.py", "        for request in self.preemption.begin_step():\n            self._requeue(request)  # a step failed: its cached tokens cannot be trusted\n", "", "tests/policies/test_policy.py"),
    "ignore-max-wait": Mutation("policies/ordering.py", "    if max_wait is not None:\n", "    if False:\n", SHADOW),
    "sjf-forgets-the-prompt": Mutation("policies/ordering.py", "return num_uncached + max(0, num_output_left)", "return max(0, num_output_left)", "tests/policies/test_policy.py"),
    "reserve-too-little": Mutation("policies/admission.py", "cdiv(request.max_total_tokens - 1, self.allocator.block_size)", "cdiv(request.max_total_tokens - 2, self.allocator.block_size)", "tests/policies/test_policy.py tests/test_shadow_cache.py"),
    "no-look-ahead": Mutation("policies/admission.py", "min(request.num_tokens + 1, request.max_total_tokens - 1)", "request.num_tokens", SHADOW),
    "hits-cost-nothing": Mutation("policies/admission.py", "self.num_blocks(request) - len(cached) + num_taken", "self.num_blocks(request) - len(cached)", SHADOW),
    "cached-too-early": Mutation("scheduler.py", "        request.status = RUNNING\n        self.waiting.remove(request)\n", "        request.status = RUNNING\n        done = request.num_computed_tokens + entry.num_tokens\n        self.allocator.cache_blocks(request.token_ids, request.block_table, done, request.cache_salt)\n        self.waiting.remove(request)\n", SHADOW),
    "join-a-static-batch": Mutation("policies/static_batch.py", "        self._gathered_before = 0\n", "        pass\n", SHADOW),
    "preempted-row-stays-in-its-batch": Mutation("policies/static_batch.py", "            self.close()\n", "", "tests/policies/test_static_batch.py"),
    "samples-wait-in-a-static-batch": Mutation("policies/static_batch.py", "        return False\n", "        return request.must_wait is not None and request.must_wait()\n", "tests/policies/test_static_batch.py"),
    "finished-rows-hold-blocks": Mutation("scheduler.py", "admission.begin([r for r in self.running if r.status is RUNNING])", "admission.begin(self.running)", "tests/policies/test_static_batch.py"),
    "recompute-needs-one-step": Mutation("scheduler.py", "may_be_cut = config.enable_chunked_prefill or request.output_token_ids", "may_be_cut = config.enable_chunked_prefill", "tests/test_scheduler.py"),
    "first-prefill-in-chunks": Mutation("scheduler.py", "if num_left > budget and not may_be_cut:", "if False:", SHADOW),
    "token-left-for-a-victim": Mutation("scheduler.py", "                        num_behind -= 1  # the victim was still to come\n", "                        pass\n", "tests/policies/test_policy.py"),
    "predict-a-block-too-few": Mutation("policies/admission.py", "peak + (len(self._running) + 1) * (self", "peak + len(self._running) * (self", "tests/policies/test_policy.py"),
    "lost-tokens-are-not-counted": Mutation("policies/preemption.py", "        request.num_lost_tokens = request.num_computed_tokens\n", "", "tests/policies/test_policy.py"),
    "swap-keeps-host-blocks": Mutation("extensions/swap.py", "        self.host.free(request.host_block_table)\n        request.host_block_table = []\n        self.unconfirmed", "        request.host_block_table = []\n        self.unconfirmed", SHADOW),
    "host-pool-has-no-limit": Mutation("utils/cache_size.py", "max(1, min(num_blocks, HOST_CACHE_BYTES // bytes_per_block))", "num_blocks", "tests/extensions/test_host_cache.py"),
    "host-pool-of-all-gpus": Mutation("simulation/replica.py", "cost_model.block_bytes // cost_model.tensor_parallel_size", "cost_model.block_bytes", "tests/simulation/test_simulator.py"),
    "swaps-past-the-runners-cache": Mutation("config.py", "            (\"num_host_blocks\", self.num_swap_blocks, of_runner.num_swap_blocks),\n", "", "tests/extensions/test_host_cache.py"),
    "abort-of-the-last-is-not-shown": Mutation("engine.py", "        return bool(self.outputs.ready) or self.scheduler.has_unfinished()\n", "        return self.scheduler.has_unfinished()\n", "tests/test_engine.py"),
    "discarded-is-shown": Mutation("engine.py", "            self.outputs.ready = deque(out for out in ready if out.request_id not in ids)\n", "", "tests/test_engine.py"),
    "abort-leaks": Mutation("scheduler.py", "        self.preemption.release(request)\n", "", "tests/test_scheduler.py"),
    "too-long-is-let-in": Mutation("policies/admission.py", "        if num_prompt + 1 > size:", "        if num_prompt > size:", "tests/test_scheduler.py"),
    "length-beats-stop": Mutation("request.py", "        if token_id in self.stop_token_ids and num_output > self.params.min_tokens:\n            return \"stop\"\n        return \"length\" if num_output >= self.max_tokens else None", "        if num_output >= self.max_tokens:\n            return \"length\"\n        is_stop = token_id in self.stop_token_ids and num_output > self.params.min_tokens\n        return \"stop\" if is_stop else None", "tests/test_engine.py tests/test_scheduler.py"),
    # ---- drafts
    "drafts-count-though-rejected": Mutation("scheduler.py", "                num_computed = len(request.token_ids) - 1\n", "                pass\n", SHADOW),
    "drafts-take-what-others-need": Mutation("extensions/speculative.py", "num_spare = allocator.num_free_blocks - look_ahead.num_promised", "num_spare = allocator.num_free_blocks", "tests/extensions/test_speculative.py"),
    "rejected-drafts-keep-blocks": Mutation("scheduler.py", "            hook.begin_step()\n", "            pass\n", "tests/extensions/test_speculative.py"),
    "all-drafts-are-right": Mutation("extensions/speculative_runner.py", "        if token.token_id != drafted:\n            break\n", "", "tests/extensions/test_speculative.py"),
    "rejected-draft-is-drawn-again": Mutation("extensions/rejection_sampling.py", "torch.where(left_XV.sum(dim=1, keepdim=True) > 0, left_XV, p_XV)", "p_XV", "tests/extensions/test_speculative.py"),
    "draft-is-always-accepted": Mutation("extensions/rejection_sampling.py", "* q_X < p_X", "* 0 < p_X", "tests/extensions/test_speculative.py"),
    "last-draft-is-not-computed": Mutation("extensions/draft_model.py", "range(1 + max(len(s.draft_token_ids) for s in scheduled))", "range(max(1, *(len(s.draft_token_ids) for s in scheduled), 1))", "tests/extensions/test_speculative.py"),
    "stop-keeps-what-follows": Mutation("outputs.py", "request.drop_tokens(detokenizer.extend(new_token_ids, hidden))", "detokenizer.extend(new_token_ids, hidden)", "tests/extensions/test_speculative.py"),
    "lookup-between-two-tokens": Mutation("extensions/speculative.py", "        if start % width == 0:\n", "        if True:\n", "tests/extensions/test_speculative.py"),
    # ---- batch and attention
    "positions-from-zero": Mutation("batch.py", "np.arange(num_tokens) + (starts_S - query_start_loc[:-1])[row_of_T]", "np.arange(num_tokens) - query_start_loc[:-1][row_of_T]", "tests/test_attention.py"),
    "wrong-row-for-logits": Mutation("batch.py", "np.repeat(ends_S - counts_S.cumsum(), counts_S)", "np.repeat(ends_S - counts_S.cumsum() - 1, counts_S)", "tests/test_attention.py"),
    "minus-one-is-the-last-block": Mutation("kernels/kv_cache.py", "        if not is_real_T.all():", "        if False:", "tests/test_attention.py"),
    "window-off-by-one": Mutation("attention_masks.py", "key_pos > query_pos - sliding_window", "key_pos >= query_pos - sliding_window", "tests/test_attention.py"),
    "tail-not-zeroed": Mutation("kernels/gather.py", "            x.view(-1, D).index_fill_(0, self.tail, 0)\n", "", "tests/test_attention.py"),
    "a-placeholder-may-be-the-last": Mutation("request.py", "            if num_output >= self.max_tokens:\n                self.status = RequestStatus.ENDING\n", "", "tests/extensions/test_async_scheduling.py"),
    "penalties-of-placeholders": Mutation("extensions/async_scheduling.py", "        if self._in_flight is not None and _needs_tokens(self._in_flight):\n            self._record_step()\n", "", "tests/extensions/test_async_scheduling.py"),
    "tokens-of-those-that-ended": Mutation("extensions/async_scheduling.py", "if r.token_ids[-1] == -1 - i]", "]", "tests/extensions/test_async_scheduling.py"),
    "recovered-with-placeholders": Mutation("outputs.py", "self.marked + _known([s for s in streams if s.request.has_placeholder])", "self.marked", "tests/extensions/test_async_scheduling.py"),
    "an-abort-waits-for-a-token": Mutation("scheduler.py", "        request.drop_placeholder()\n", "", "tests/extensions/test_async_scheduling.py"),
    "the-first-token-is-early": Mutation("extensions/async_scheduling.py", "self.scheduler.update(plan, placeholders, None)", "self.scheduler.update(plan, placeholders, self.clock.now())", "tests/extensions/test_async_scheduling.py"),
    "a-batch-waits-for-the-gpu": Mutation("batch.py", ".to(device, non_blocking=True)", ".to(device)", "tests/test_cuda_paths.py"),
    "a-row-takes-another-s-token": Mutation("batch.py", "which_T = (-1 - token_ids_T)", "which_T = (-2 - token_ids_T)", "tests/extensions/test_decode_graphs.py"),
    "padding-row-writes": Mutation("extensions/cuda_graphs.py", "(0, num_pads), value=PADDING_SLOT)", "(0, num_pads))", "tests/extensions/test_decode_graphs.py"),
    # ---- several engines
    "router-sees-the-future": Mutation("simulation/replica.py", "            if self.clock.now() > until:\n                return\n", "", "tests/simulation/test_replicas.py"),
    "late-to-the-step": Mutation("simulation/replica.py", "self.clock.now() < until and", "self.clock.now() <= until and", "tests/simulation/test_replicas.py"),
    "hits-of-another-salt": Mutation("simulation/replica.py", "allocator.match_prefix(request.token_ids, request.cache_salt)", "allocator.match_prefix(request.token_ids)", "tests/simulation/test_replicas.py"),
    "hot-prefix-drowns-one": Mutation("simulation/router.py", "        if not self.are_far_apart([replica.num_unfinished for replica in replicas]):\n", "        if True:\n", "tests/simulation/test_replicas.py"),
    "least-loaded-by-history": Mutation("simulation/router.py", "return replica.num_unfinished, replica.num_given", "return replica.num_given, replica.num_unfinished", "tests/simulation/test_replicas.py"),
    "abort-takes-any-id": Mutation("engine.py", "        check_request_id(request_id)\n", "", "tests/test_engine.py"),
    # ---- measuring
    "goodput-by-any-limit": Mutation("metrics.py", "return all(spans[name] is None or", "return any(spans[name] is None or", "tests/bench/test_workload.py"),
    "idle-start-counts": Mutation("metrics.py", "return max(last - first, 1e-9)", "return max(last, 1e-9)", "tests/bench/test_workload.py"),
    "traces-split-like-texts": Mutation("bench/trace.py", "iter(lambda: lines.readline(MAX_LINE + 1), b\"\")", "[x.encode() for x in lines.read().decode().splitlines()]", "tests/bench/test_trace.py"),
    "late-traces-are-waited-for": Mutation("bench/trace.py", "arrival_time=item.arrival_time - first)", "arrival_time=item.arrival_time)", "tests/bench/test_trace.py"),
    "ids-past-the-vocabulary": Mutation("bench/trace.py", "if max(prompt) >= vocab_size:", "if max(prompt) > vocab_size:", "tests/bench/test_trace.py"),
    "exit-before-the-json": Mutation("bench/cli.py", "    result = module.run_command(args) | {\"args\": report.args_of(args)}\n", "    result = module.run_command(args) | {\"args\": report.args_of(args)}\n    if result.get(\"failure\"):\n        sys.exit(result[\"failure\"])\n", "tests/bench/test_fuzz.py"),
    "one-kernel-ends-the-table": Mutation("bench/kernels.py", "        except Exception as error:  # of any kind: Triton's and CUDA's have no common one\n", "        except MemoryError as error:\n", "tests/simulation/test_roofline.py"),
    "hung-compiler-leaves-its-child": Mutation("utils/processes.py", "os.killpg(process.pid, signal.SIGKILL)", "process.kill()", "tests/extensions/test_cpu_library.py"),
    "what-hangs-leaves-its-children": Mutation("utils/processes.py", "os.killpg(process.pid, signal.SIGKILL)", "process.kill()", "tests/bench/test_gpu_visit.py"),
    "failed-among-others-has-failed": Mutation("bench/gpu/suite.py", "        alone = run_processes(root, files, 1, end, again)\n", "        alone = {}\n", "tests/bench/test_gpu_visit.py"),
    "rows-only-at-the-end": Mutation("bench/gpu/parts.py", "            found[\"rows\"].append(row)\n            report.save(found, file)\n", "            found[\"rows\"].append(row)\n", "tests/bench/test_gpu_visit.py"),
    "another-card-is-as-good": Mutation("bench/gpu/summary.py", "            met = met if one.card in card else \"another card\"\n", "", "tests/bench/test_gpu_visit.py"),
    "figure-before-the-json": Mutation("bench/cli.py", "    if getattr(args, \"save_json\", None) is not None:\n        report.save(result, args.save_json)\n    if figures", "    if figures", "tests/bench/test_cli.py"),
    "half-a-report": Mutation("bench/report.py", "        write(new)\n", "        write(Path(target))\n        write(new)\n", "tests/bench/test_cli.py"),
    # ---- kernels
    "kernel-32-bit-slots": Mutation("paged_attention_kernel.py", "(block_L.to(tl.int64) * K + kv_head)", "(block_L * K + kv_head)", "tests/kernels/test_kernels.py"),
    "kernel-poisoned-values": Mutation("paged_attention_kernel.py", "v_LD = tl.load(v_cache_ptr + where_LD, mask=is_here_LD, other=0.0)", "v_LD = tl.load(v_cache_ptr + where_LD, mask=is_d_D[None, :] & (pos_L >= 0)[:, None], other=0.0)", "tests/kernels/test_kernels.py"),
    "kernel-top-left": Mutation("paged_attention_kernel.py", "pos_M = context_len + query_M", "pos_M = query_M", "tests/kernels/test_kernels.py"),
    "kernel-empty-split-counts": Mutation("paged_attention_kernel.py", "tl.store(sum_ptr + part_M, sum_M, mask=is_row_M)", "tl.store(sum_ptr + part_M, sum_M, mask=is_row_M & (sum_M > 0))", "tests/kernels/test_kernels.py"),
    "kernel-nan-split-is-dropped": Mutation("paged_attention_kernel.py", "mask=is_split_X[:, None] & is_d_D[None, :]", "mask=(sum_X > 0)[:, None] & is_d_D[None, :]", "tests/kernels/test_kernels.py"),
    "kernel-block-ids-a-tile-late": Mutation("paged_attention_kernel.py", "        block_L = tl.load(table_ptr + pos_L // P,", "        block_L = tl.load(table_ptr + (pos_L - TILE) // P,", "tests/kernels/test_kernels.py"),
    "kernel-past-the-block-table": Mutation("paged_attention_kernel.py", "        block_L = tl.load(table_ptr + pos_L // P, mask=pos_L < seq_len, other=0)\n\n", "        block_L = tl.load(table_ptr + pos_L // P)\n\n", "tests/kernels/test_ptx.py"),
    "kernel-past-the-queries": Mutation("paged_attention_kernel.py", "        mask=is_row_M[:, None] & is_d_D[None, :],\n        other=0.0,\n", "        mask=(row_M >= 0)[:, None] & is_d_D[None, :],\n        other=0.0,\n", "tests/kernels/test_ptx.py"),
    "kernel-no-maximum": Mutation("paged_attention_kernel.py", "max_M = tl.full([BLOCK_M], float(\"-inf\"), tl.float32)", "max_M = tl.full([BLOCK_M], 0.0, tl.float32)", "tests/kernels/test_kernels.py"),
    "kernel-slot-minus-one": Mutation("kernels/triton_ops.py", "        if slot < 0:\n            return\n", "", "tests/kernels/test_kernels.py"),
    "any-numpy-for-the-interpreter": Mutation("kernels/ops.py", "triton_version < (3, 7) and numpy_version >= (2, 4)", "triton_version < (3, 7) and numpy_version >= (2, 5)", "tests/kernels/test_kernels.py"),
    "colab-takes-any-address": Mutation("check/student.py", 'f"{COLAB}/github")', "COLAB)", "tests/test_packaging.py"),
    "badges-open-the-solutions": Mutation("check/student.py", "/blob/main/notebooks/student/{name}", "/blob/main/notebooks/{name}", "tests/check/test_notebooks.py"),
    # ---- a cache in 8 bits
    "values-without-their-scale": Mutation("extensions/quantized_kernels.py", "        p_ML *= v_scale_L[None, :]  # after the sum: it belongs to the values\n", "", "tests/extensions/test_kv_cache.py"),
    "one-tile-in-flight": Mutation("paged_attention_kernel.py", "    for _ in range(first_tile, end_tile):\n        is_key_L = pos_L < seq_len\n", "    for _ in range(first_tile, end_tile):\n        is_key_L = pos_L < seq_len\n        block_L = tl.load(table_ptr + pos_L // P, mask=is_key_L, other=0)\n", "tests/kernels/test_compiled_kernels.py"),
    "one-tile-in-flight-of-8-bits": Mutation("extensions/quantized_kernels.py", "    for _ in range(first_tile, end_tile):\n        is_key_L = pos_L < seq_len\n", "    for _ in range(first_tile, end_tile):\n        is_key_L = pos_L < seq_len\n        block_L = tl.load(table_ptr + pos_L // P, mask=is_key_L, other=0)\n", "tests/kernels/test_compiled_kernels.py"),
    "tiles-of-a-large-chip-on-all": Mutation("kernels/launch_config.py", "(2 if takes_from_shared_memory else 1)", "2", "tests/kernels/test_compiled_kernels.py"),
    "experts-spill-without-matrix-units": Mutation("kernels/grouped_matmul.py", "return 4 if capability >= (8, 0) else 8", "return 4", "tests/kernels/test_compiled_kernels.py"),
    "pairs-the-wrong-way-round": Mutation("extensions/quantized_kernels.py", "tl.interleave(even_MX, odd_MX)", "tl.interleave(odd_MX, even_MX)", "tests/extensions/test_kv_cache.py"),
    "kernel-truncates-to-int8": Mutation("extensions/quantized_kernels.py", "tl.floor(a_XR + 0.5), tl.floor(b_XR + 0.5)", "tl.floor(a_XR), tl.floor(b_XR)", "tests/extensions/test_kv_cache.py"),
    "nan-becomes-a-number": Mutation("extensions/quantized_kernels.py", "tl.where(x_XR == x_XR, tl.abs(x_XR), float(\"inf\"))", "tl.abs(x_XR)", "tests/extensions/test_kv_cache.py"),
    "zeros-without-a-scale": Mutation("extensions/quantized_cache.py", ".clamp(min=SMALLEST_SCALE)", "", "tests/extensions/test_kv_cache.py"),
    # ---- the CPU's kernels
    "old-torch-has-no-bfloat16": Mutation("utils/device.py", "    return getattr(torch.cpu, ASKED_ONE_BY_ONE[feature])()\n", "    return False\n", "tests/utils/test_device.py"),
    "graphs-take-no-memory": Mutation("llm.py", "    return 0 if graphs is None else graphs.bytes_of_graphs(runner)\n", "    return 0\n", "tests/test_cuda_paths.py"),
    "warm-up-of-decodes-only": Mutation("kernels/warm_up.py", "starts_of_runs(1, longest_query(config), lambda n: variant_of(of_one(n)))", "[1]", "tests/kernels/test_warm_up.py tests/test_cuda_paths.py"),
    "warm-up-of-one-kind-of-layer": Mutation("kernels/warm_up.py", "(layer.heads[0], cache.keys.shape[1:], layer.attention_args), cache)", "(layer.heads[0], cache.keys.shape[1:], layers[0].attention_args), cache)", "tests/test_cuda_paths.py"),
    "derived-before-the-graph": Mutation("extensions/cuda_graphs.py", "        def step() -> None:\n            self._logits_SV[:size].copy_(self._runner.forward(self._first_rows(size)))\n", "        batch = self._first_rows(size)\n\n        def step() -> None:\n            self._logits_SV[:size].copy_(self._runner.forward(batch))\n", "tests/extensions/test_decode_graphs.py"),
    "bfloat16-on-a-t4": Mutation("utils/device.py", "    if capability < BFLOAT16_CAPABILITY:\n", "    if False:\n", "tests/test_cuda_paths.py"),
    "fp8-refused-after-loading": Mutation("llm.py", "    choose_kind(config.kv_cache_dtype, dtype, device)  # refused before minutes of loading\n", "", "tests/test_cuda_paths.py"),
    "amx-alone-is-float32": Mutation("utils/device.py", "cpu_has(\"avx512_bf16\") or cpu_has(\"amx_bf16\")", "cpu_has(\"avx512_bf16\")", "tests/utils/test_device.py"),
    "c-reads-the-tail": Mutation("extensions/cpu/kernels.c", "last = end - b * P < P ? end - b * P : P;", "last = P;", "tests/extensions/test_cpu_kernels.py tests/test_attention.py"),
    "c-values-without-their-scale": Mutation("extensions/cpu/kernels.c", "                score[g][p] *= scale_of(here.v_scale, p);\n", "", "tests/extensions/test_kv_cache.py"),
    "c-truncates-to-int8": Mutation("extensions/cpu/cache.h", "(cell)floorf(f + 0.5f)", "(cell)floorf(f)", "tests/extensions/test_kv_cache.py"),
    "c-fp8-rounds-ties-up": Mutation("extensions/cpu/cache.h", "+ 0x7ffff + ((bits >> 20) & 1)", "+ 0x80000", "tests/extensions/test_kv_cache.py"),
    "c-nan-becomes-a-number": Mutation("extensions/cpu/cache.h", "is_finite &= size <= FLT_MAX;", "is_finite &= 1;", "tests/extensions/test_kv_cache.py"),
    "c-no-shrink": Mutation("extensions/cpu/kernels.c", "            for (int d = 0; d < D; d++) out[g][d] *= shrink;\n", "", "tests/extensions/test_cpu_kernels.py"),
    "c-window": Mutation("extensions/cpu/kernels.c", "int first = b * P < start ? start - b * P : 0,", "int first = 0,", "tests/extensions/test_cpu_kernels.py"),
    "c-slot-minus-one": Mutation("extensions/cpu/kernels.c", "        if (slot_T[t] < 0) continue;\n", "", "tests/extensions/test_cpu_kernels.py"),
    "c-nan-is-a-number": Mutation("extensions/cpu/elem.h", "return is_nan ? 0x7fc0 : ", "return ", "tests/extensions/test_cpu_kernels.py"),
    "a-row-that-raises-ends-all": Mutation("sampler.py", "        if len(rows) == 1:\n            failed", "        if True:\n            failed", "tests/test_sampler.py"),
    "top-k-of-any-size": Mutation("sampling_row.py", "params.top_k if 0 < params.top_k < vocab_size else", "params.top_k if 0 < params.top_k else", "tests/test_engine.py"),
    "ctrl-c-within-a-step": Mutation("utils/interrupts.py", "            if callable(handler):\n", "            if False:\n", "tests/test_interrupts.py"),
    "a-noted-ctrl-c-is-lost": Mutation("utils/interrupts.py", "            if self._noted is not None:\n                self._handler", "            if False:\n                self._handler", "tests/test_interrupts.py"),
    "threads-step-at-once": Mutation("llm.py", "            with self.engine.guard:\n                if not inbox:\n", "            if True:\n                if not inbox:\n", "tests/test_interrupts.py"),
    "undone-steps-keep-their-tokens": Mutation("recovery.py", "            stream.rewind(num_tokens)\n", "", "tests/test_interrupts.py"),
    "earlier-steps-are-undone": Mutation("recovery.py", "    outputs.marked = []  # of what is done already\n", "", "tests/simulation/test_replicas.py"),
    "undone-steps-keep-their-blocks": Mutation("recovery.py", "        request.num_computed_tokens = 0\n", "", "tests/test_interrupts.py"),
    "a-tokenizer-s-error-ends-all": Mutation("outputs.py", "            except Exception as error:", "            except OSError as error:", "tests/test_interrupts.py"),
    "c-last-of-equals": Mutation("extensions/cpu/kernels.c", "<= order(x_V[ids[worst]]) ? i : worst;", "< order(x_V[ids[worst]]) ? i : worst;", "tests/extensions/test_cpu_kernels.py"),
    "tiles-lower-rows": Mutation("extensions/cpu/matmul.c", "x + (int64_t)SIDE * K + k", "x + k", "tests/extensions/test_cpu_tiles.py"),
    "gate-and-up-not-in-turns": Mutation("extensions/cpu/products.py", "rows.unflatten(0, (2, -1, 16)).transpose(0, 1).reshape(rows.shape)", "rows", "tests/extensions/test_cpu_kernels.py tests/extensions/test_cpu_tiles.py"),
    "prefill-sees-the-future": Mutation("extensions/cpu/prefill.c", "high[i] = least(at + 1, stop) - start;", "high[i] = stop - start;", "tests/extensions/test_cpu_tiles.py"),
    "prefill-no-shrink": Mutation("extensions/cpu/prefill.c", "        for (int d = 0; d < D; d++) w->out[row + i][d] *= shrink[i];\n", "        ;\n", "tests/extensions/test_cpu_tiles.py"),
    "prefill-reads-the-tail": Mutation("extensions/cpu/prefill.c", "            if (position >= end) continue;\n", "", "tests/extensions/test_cpu_tiles.py"),
    # ---- the compiled library
    "library-key-without-the-machine": Mutation("extensions/cpu/compiler.py", "list(defines), machine, cc,", "list(defines), cc,", "tests/extensions/test_cpu_library.py"),
    "library-key-without-the-cpu": Mutation("extensions/cpu/compiler.py", "cc, _target(cc)))", "cc))", "tests/extensions/test_cpu_library.py"),
    "library-key-without-the-headers": Mutation("extensions/cpu/compiler.py", "[source, *sorted(source.parent.glob(\"*.h\"))]", "[source]", "tests/extensions/test_cpu_library.py"),
    "library-unread-is-whole": Mutation("extensions/cpu/compiler.py", "_open(file, names) if has_same_sum else None", "_open(file, names)", "tests/extensions/test_cpu_library.py"),
    "library-of-somebody-else": Mutation("extensions/cpu/compiler.py", "if not is_ours or found.st_mode & 0o022:", "if not is_ours:", "tests/extensions/test_cpu_library.py"),
    # ---- the idea in one file
    "minimal-slot-without-its-table": Mutation("minimal.py", "slots.append(request.block_table[block] * self.block_size + offset)", "slots.append(block * self.block_size + offset)", "tests/test_minimal.py"),
    "minimal-sees-the-future": Mutation("minimal.py", "torch.arange(len(k_LKD)) > positions_T.unsqueeze(1)", "torch.arange(len(k_LKD)) > positions_T.max()", "tests/test_minimal.py"),
    "minimal-leaks-blocks": Mutation("minimal.py", "                self.free(request)\n        return plan", "        return plan", "tests/test_minimal.py"),
    "minimal-preempted-is-not-computed-again": Mutation("minimal.py", "        request.num_computed = 0\n", "", "tests/test_minimal.py"),
    # ---- families of models
    "experts-are-not-unsorted": Mutation("models/experts.py", "        unsorted_ME[order_M] = rows_ME\n", "        unsorted_ME[:] = rows_ME\n", "tests/models/test_experts.py"),
    "experts-a-tile-too-far": Mutation("kernels/grouped_matmul.py", "right=True)", "right=False)", "tests/models/test_experts.py"),
    "gemma-norms-as-they-are": Mutation("models/families.py", "{\"norm_offset\": 1.0, \"post_norm\": True}", "{\"post_norm\": True}", "tests/models/test_models.py"),
    "longrope-one-off": Mutation("models/config.py", "else max_model_len) > short:", "else max_model_len) >= short:", "tests/models/test_models.py"),
    "unturned-pairs-grow": Mutation("models/rope.py", "cos_TR[:, : self.rotary_dim // 2] *= self.factor", "cos_TR *= self.factor", "tests/models/test_models.py"),
    "yarn-keeps-the-slow": Mutation("models/rope_scaling.py", "return [1 - _between_0_and_1(", "return [_between_0_and_1(", "tests/models/test_models.py"),
    "gguf-believes-its-counts": Mutation("models/gguf_header.py", "        if count * num_bytes > left:\n", "        if count * num_bytes > 2**70:\n", "tests/models/test_gguf_checkpoint.py"),
    "gguf-offsets-not-aligned": Mutation("models/gguf_header.py", "            if offset % alignment:\n", "            if False:\n", "tests/models/test_gguf_checkpoint.py"),
    "gguf-unread-keys-pass": Mutation("models/gguf_checkpoint.py", "allowed = same.get(name, (0,))", "allowed = same.get(name, (value,))", "tests/models/test_gguf_checkpoint.py"),
    "gguf-factor-without-type": Mutation("models/gguf_checkpoint.py", "rope.scaling.type\", \"linear\")", "rope.scaling.type\", \"none\")", "tests/models/test_gguf_checkpoint.py"),
    "integers-are-weights": Mutation("models/checkpoints.py", "if piece.get_dtype() not in FLOATS:", "if False:", "tests/models/test_checkpoints.py"),
    "mapped-weights-take-memory": Mutation("models/checkpoints.py", "return self._slice(name)[:0].dtype == dtype", "return False", "tests/models/test_loader.py"),
    "swap-does-not-count": Mutation("utils/memory.py", " + kib.get(\"SwapFree\", 0)", "", "tests/utils/test_memory.py"),
    "olmo-2-s-eps-is-llama-s": Mutation("models/families.py", "\"qk_norm\": \"all_heads\"}, eps=1e-5, eos", "\"qk_norm\": \"all_heads\"}, eos", "tests/models/test_hf_config.py"),
    "null-heads-are-missing": Mutation("models/hf_config.py", "{\"num_key_value_heads\": family.num_kv_heads} | raw", "dict(raw)", "tests/models/test_hf_config.py"),
    "scaled-rope-without-a-type": Mutation("models/hf_config.py", "    if name == \"rope_scaling\" and not", "    if False and not", "tests/models/test_hf_config.py"),
    "rope-pairs-not-reordered": Mutation("models/weight_names.py", "    head = [*range(half), *rest[:middle], *range(half, 2 * half), *rest[middle:]]\n", "    head = list(range(D))\n", "tests/models/test_models.py"),
    "remote-code-is-run": Mutation("models/tokenizer.py", "directory, trust_remote_code=False", "directory", "tests/models/test_remote_code.py"),
    "working-directory-is-run": Mutation("models/chat_template.py", "*filter(None, sys.path)", "*sys.path", "tests/models/test_remote_code.py"),
    "template-text-without-end": Mutation("models/chat_sandbox.py", "if num_chars > max_chars:", "if False:", "tests/models/test_chat_template.py"),
    "template-blocks-leave-lines": Mutation("models/chat_sandbox.py", "trim_blocks=True", "trim_blocks=False", "tests/models/test_chat_template.py"),
    "greedy-settings-sample": Mutation("models/sampling_defaults.py", "if do_sample is False else {}", "if False else {}", "tests/models/test_sampling_defaults.py"),
    "settings-ignored": Mutation("models/sampling_defaults.py", 'if value not in (None, off, [], {}, ""):', "if False:", "tests/models/test_sampling_defaults.py"),
    "stop-within-a-special-token": Mutation("detokenizer.py", "if token in text), None)", "if token == text), None)", "tests/test_engine.py"),
    "template-names-with-underscores": Mutation("models/chat_sandbox.py", 'if str(name).startswith("_"):', "if False:", "tests/models/test_chat_template.py"),
    # ---- several ranks
    "bias-of-every-rank": Mutation("extensions/tensor_parallel.py", "return whole if rank == 0 else torch.zeros_like(whole)", "return whole", "tests/extensions/test_tensor_parallel.py"),
    "rows-of-other-ranks": Mutation("extensions/tensor_parallel.py", "x_TE.masked_fill_(is_elsewhere_T.unsqueeze(1), 0)", "x_TE", "tests/extensions/test_tensor_parallel.py"),
    "each-rank-its-clock": Mutation("extensions/ranks.py", "[now] = self._ranks.first([self._clock.now()])", "now = self._clock.now()", "tests/extensions/test_tensor_parallel.py"),
    "each-rank-its-tokens": Mutation("extensions/tensor_parallel.py", "return self.ranks.first_object(self.runner.run(plan))", "return self.runner.run(plan)", "tests/extensions/test_tensor_parallel.py"),
    # ---- sampling and text
    "top-k-after-top-p": Mutation("kernels/distribution.py", ".masked_fill_(~is_kept_RX, 0)", "", "tests/test_sampler.py"),
    "top-p-drops-the-likeliest": Mutation("kernels/distribution.py", "is_kept_RX[:, 1:] &= (mass_RX[:, :-1]", "is_kept_RX &= (mass_RX", "tests/test_sampler.py"),
    "shared-random-stream": Mutation("sampling_row.py", "f\"{row.seed}:{len(row.output_token_ids)}{use}\"", "f\"{row.seed}{use}\"", "tests/test_sampler.py tests/test_engine.py"),
    "nan-is-a-token": Mutation("sampler.py", "is_ok_S1 = is_number_S1 & logits_SV", "is_ok_S1 = logits_SV", "tests/test_sampler.py"),
    "penalty-counts-the-prompt": Mutation("sampling_row.py", "counts = Counter(row.output_token_ids)", "counts = Counter([*row.prompt_token_ids, *row.output_token_ids])", "tests/test_sampler.py"),
    "min-tokens-ignored": Mutation("sampling_row.py", "num_output < params.min_tokens:", "num_output < 0:", "tests/test_sampler.py"),
    "digits-stay-together": Mutation("models/pre_tokenizers.py", "(r\"\\p{N}\", _GPT2)", "(_GPT2,)", "tests/models/test_gguf_tokenizer.py"),
    "only-eos-ends-a-text": Mutation("models/gguf_tokenizer.py", "for name in (\"eos\", \"eot\", \"eom\")", "for name in (\"eos\",)", "tests/models/test_gguf_tokenizer.py"),
    "user-defined-is-not-shown": Mutation("models/gguf_tokenizer.py", "special=kind != USER_DEFINED", "special=True", "tests/models/test_gguf_tokenizer.py"),
    "worst-score-first": Mutation("models/gguf_tokenizer.py", "key=lambda i: -scores[i]", "key=lambda i: scores[i]", "tests/models/test_gguf_tokenizer.py"),
    "prompt-tail-too-short": Mutation("models/tokenizer.py", "if len(tail) >= 3:", "if len(tail) >= 2:", "tests/models/test_tokenizer.py"),
    "first-word-keeps-its-space": Mutation("models/tokenizer.py", "self._is_first = not tail", "self._is_first = False", "tests/models/test_tokenizer.py"),
    "stop-is-streamed": Mutation("detokenizer.py", "len(self._rest) - self._num_held_back()", "len(self._rest)", "tests/models/test_tokenizer.py"),
    "first-stop-in-list-wins": Mutation("detokenizer.py", "_, start = min(found, key=lambda end_start: end_start[0])", "_, start = found[0]", "tests/models/test_tokenizer.py"),
    "stop-within-a-token-only": Mutation("detokenizer.py", "max(0, num_old - len(s) + 1)", "num_old", "tests/models/test_tokenizer.py"),
    # ---- blocks
    "last-of-equal-blocks": Mutation("block_allocator.py", "next(iter(self._holders[k]))", "next(reversed(self._holders[k]))", "tests/test_block_allocator.py"),
    "chain-numbers-are-reused": Mutation("block_allocator.py", "self._chains[key] = self._next_chain\n", "self._chains[key] = len(self._chains)\n", "tests/test_block_allocator.py tests/test_shadow_cache.py"),
    "acquire-a-block-twice": Mutation("block_allocator.py", "        self._check_distinct(\"acquire\", block_ids)\n", "", "tests/test_block_allocator.py"),
    "cache-beyond-the-table": Mutation("block_allocator.py", "if num_full > len(block_table):", "if num_full > len(block_table) + 1:", "tests/test_block_allocator.py"),
    # ---- metrics
    "itl-of-an-ended-request": Mutation("metrics.py", "        self._last.pop(request_id, None)\n", "        pass\n", "tests/bench/test_workload.py"),
    "itl-percentile-one-up": Mutation("metrics.py", "if seen >= rank:", "if seen > rank:", "tests/bench/test_workload.py"),
    "share-of-recomputed": Mutation("metrics.py", "num_recomputed / max(1, num_computed + num_recomputed)", "num_recomputed / max(1, num_computed)", "tests/bench/test_workload.py"),
    "cached-tokens-were-computed": Mutation("metrics.py", "num_input + num_output - sum(m.num_cached_tokens for m in metrics)", "num_input + num_output", "tests/bench/test_workload.py"),
    "padding-share-of-rows": Mutation("metrics.py", "_share(self.num_padding, self.num_rows + self.num_padding)", "_share(self.num_padding, self.num_rows)", "tests/bench/test_workload.py"),
    "copies-out-only": Mutation("metrics.py", "len(plan.swap_out) + len(plan.swap_in)", "len(plan.swap_out)", "tests/bench/test_workload.py"),
    "every-token-was-a-draft": Mutation("metrics.py", "self.num_accepted_tokens += num_tokens - num_samples", "self.num_accepted_tokens += num_tokens", "tests/extensions/test_speculative.py"),
    "itl-of-replicas-not-summed": Mutation("metrics.py", "        self._sum += other._sum\n", "", "tests/simulation/test_replicas.py"),
    "tpot-counts-the-first": Mutation("request.py", "decode_time / (self.num_output_tokens - 1)", "decode_time / self.num_output_tokens", "tests/test_scheduler.py"),
    "hits-of-a-second-admission": Mutation("request.py", "            self.metrics.num_cached_tokens = num_cached\n", "        self.metrics.num_cached_tokens = num_cached\n", "tests/test_scheduler.py"),
    # ---- cost
    "chunks-go-through-lm-head": Mutation("simulation/cost_model.py", "num_logits += start + n == len(row.request.token_ids)", "num_logits += 1", "tests/simulation/test_simulator.py"),
    "padding-reads-no-keys": Mutation("simulation/cost_model.py", "            num_keys += request.num_tokens\n", "", "tests/simulation/test_simulator.py"),
    "all-reduce-once": Mutation("simulation/cost_model.py", "layer += 2 * (num_bytes / self.gpu.link + self.gpu.kernel_seconds)", "layer += num_bytes / self.gpu.link + self.gpu.kernel_seconds", "tests/simulation/test_simulator.py"),
    "no-tiles": Mutation("simulation/cost_model.py", "num_padded = cdiv(num_tokens, TILE) * TILE", "num_padded = num_tokens", "tests/simulation/test_simulator.py"),
    "copies-are-free": Mutation("simulation/cost_model.py", "return copy_seconds + self.seconds(", "return self.seconds(", "tests/simulation/test_simulator.py"),
    "memory-of-one-gpu": Mutation("simulation/cost_model.py", "self.gpu.memory * self.tensor_parallel_size * utilization", "self.gpu.memory * utilization", "tests/simulation/test_simulator.py"),
    "new-keys-are-not-written": Mutation("simulation/roofline.py", "(num_keys + num_written) * 2", "num_keys * 2", "tests/simulation/test_roofline.py"),
    "every-mlp-has-a-gate": Mutation("simulation/roofline.py", "(3 if model.gated_mlp else 2)", "3", "tests/simulation/test_roofline.py"),
    "a-hit-at-the-threshold": Mutation("simulation/router.py", "num_tokens if num_tokens > least else 0", "num_tokens if num_tokens >= least else 0", "tests/simulation/test_replicas.py"),
    "far-apart-by-either": Mutation("simulation/router.py", "high - low > self.balance_abs_threshold and high", "high - low > self.balance_abs_threshold or high", "tests/simulation/test_replicas.py"),
    # ---- masks
    "full-tiles-cost-nothing": Mutation("attention_masks.py", "        num_tiles += int(mask.full_kv_num_blocks.sum())\n", "        pass\n", "tests/test_masks.py"),
    "pads-are-keys": Mutation("attention_masks.py", " & (key_pos_S1L >= 0)", "", "tests/test_masks.py"),
    "a-pad-sees-nothing": Mutation("attention_masks.py", "pos_SL.clamp(min=0).unsqueeze(2)", "pos_SL.unsqueeze(2)", "tests/test_masks.py"),
    "window-starts-a-block-late": Mutation("kernels/gather.py", "(seq_lens - query_lens - window + 1)", "(seq_lens - query_lens - window + block_size)", "tests/test_attention.py"),
    "softcap-before-the-scale": Mutation("kernels/ops.py", "(q_SHTD @ k_SHLD.transpose(2, 3)).float() * scale\n    scores_SHTL = softcap * torch.tanh(scores_SHTL / softcap)", "(q_SHTD @ k_SHLD.transpose(2, 3)).float()\n    scores_SHTL = scale * softcap * torch.tanh(scores_SHTL / softcap)", "tests/test_attention.py"),
    # ---- sampling
    "min-p-of-one": Mutation("kernels/distribution.py", "rules.min_p_R1 * probs_RV.amax(dim=-1, keepdim=True)", "rules.min_p_R1", "tests/test_sampler.py"),
    "probabilities-do-not-sum-to-one": Mutation("kernels/distribution.py", "return probs_RV.div_(probs_RV.sum(dim=-1, keepdim=True))", "return probs_RV", "tests/test_sampler.py"),
    "the-mask-is-made-on-the-cpu": Mutation("kernels/ops.py", "k_SKLD.shape[2], device=q_SHTD.device)", "k_SKLD.shape[2])", "tests/test_cuda_paths.py"),
    "heads-of-another-token": Mutation("kernels/triton_ops.py", "row // H * x_stride", "row * x_stride", "tests/kernels/test_kernels.py"),
    "numbers-behind-the-last-chunk-are-lost": Mutation("kernels/ops.py", "(values_SCX.flatten(1), x_SV[:, num_in_chunks:])", "(values_SCX.flatten(1), x_SV[:, num_in_chunks:] - 1e9)", "tests/kernels/test_largest.py"),
    "a-tie-too-many": Mutation("kernels/distribution.py", "> num_ties_R1\n", "> num_ties_R1 + 1\n", "tests/kernels/test_distribution.py"),
    "the-search-stops-a-bit-early": Mutation("kernels/distribution.py", "in reversed(range(32))", "in reversed(range(1, 32))", "tests/kernels/test_distribution.py"),
    "top-p-of-all-mass": Mutation("kernels/distribution.py", "torch.where(has_top_k_R1, mass_RX[:, -1:], total_R1)", "total_R1", "tests/test_sampler.py"),
    "stop-ids-out-of-the-vocabulary": Mutation("sampling_row.py", "[t for t in row.stop_token_ids if t < vocab_size]", "list(row.stop_token_ids)", "tests/test_sampler.py"),
    "left-is-drawn-by-the-same-number": Mutation("extensions/rejection_sampling.py", "uniform(row, \":left\" if", "uniform(row, \":accept\" if", "tests/extensions/test_speculative.py"),
    "proposals-without-penalties": Mutation("extensions/rejection_sampling.py", "probabilities(adjust(logits_SV[drawn], drawn_rows), drawn_rows)", "probabilities(logits_SV[drawn], drawn_rows)", "tests/extensions/test_speculative.py"),
    "a-draft-past-the-end": Mutation("extensions/speculative.py", "request.max_total_tokens - num_next,", "request.max_total_tokens - num_next + 1,", "tests/extensions/test_speculative.py"),
    "the-first-earlier-place": Mutation("extensions/speculative.py", "text.rfind(last, 0, end)", "text.find(last, 0, end)", "tests/extensions/test_speculative.py"),
    "the-shortest-lookup-is-left-out": Mutation("extensions/speculative.py", "self.shortest - 1, -1):", "self.shortest, -1):", "tests/extensions/test_speculative.py"),
    # ---- graphs, cache
    "no-graph-of-the-largest-batch": Mutation("extensions/cuda_graphs.py", "*range(8, max_num_seqs, 8), max_num_seqs}", "*range(8, max_num_seqs, 8)}", "tests/extensions/test_decode_graphs.py"),
    "pads-have-a-key": Mutation("extensions/cuda_graphs.py", "seq_lens_S=F.pad(batch.seq_lens_S, (0, num_pads))", "seq_lens_S=F.pad(batch.seq_lens_S, (0, num_pads), value=1)", "tests/extensions/test_decode_graphs.py"),
    "logits-of-chunks-too": Mutation("extensions/cuda_graphs.py", "if len(sampling) == len(rows):", "if rows:", "tests/extensions/test_decode_graphs.py"),
    "scales-of-keys-for-values": Mutation("extensions/quantized_cache.py", "(self.values, self.v_scales, v_TKD)", "(self.values, self.k_scales, v_TKD)", "tests/extensions/test_kv_cache.py"),
    "fp8-on-any-gpu": Mutation("extensions/quantized_cache.py", "if capability < FP8_CAPABILITY:", "if False:", "tests/extensions/test_kv_cache.py"),
    "columns-by-rows": Mutation("extensions/ranks.py", "parts.transpose(0, 1).flatten(1)", "parts.flatten(1)", "tests/extensions/test_tensor_parallel.py"),
    # ---- models
    "few-exact-logits": Mutation("models/decoder.py", "logits_SV.scatter_(1, best_SX, exact_SX)", "logits_SV.scatter_(1, best_SX[:, :1], exact_SX[:, :1])", "tests/models/test_models.py"),
    "shares-not-normed": Mutation("models/experts.py", "        if self.norms:\n", "        if False:\n", "tests/models/test_experts.py"),
    "embedding-multiplier-in-float32": Mutation("models/variants.py", "x_TE.new_full((), self.multiplier)", "self.multiplier", "tests/models/test_models.py"),
    "mixed-step-splits-nothing": Mutation("kernels/work_list.py", "cdiv(tiles_X, share).clip(1, MAX_SPLITS)", "cdiv(tiles_X, share).clip(1, 1 if query_lens_S.max() > 1 else MAX_SPLITS)", "tests/kernels/test_kernels.py"),
    "work-shortest-first": Mutation("kernels/work_list.py", "np.lexsort((-tiles_X, splits_X == 1))", "np.lexsort((tiles_X, splits_X == 1))", "tests/kernels/test_kernels.py"),
    "decodes-join-the-prompts": Mutation("kernels/launch_plan.py", "<= max(SHORT_ROWS, H // K)", "<= 0", "tests/kernels/test_kernels.py"),
    "group-does-not-fit-its-rows": Mutation("kernels/launch_config.py", "max(16, next_power_of_two(group), next_power_of_two(rows))", "max(16, next_power_of_two(rows))", "tests/kernels/test_kernels.py"),
    # ---- lengths, figures, checks, workload
    "longest-is-forgotten": Mutation("policies/lengths.py", "bisect.bisect_left(self._lengths, self._recent[0])", "-1", "tests/policies/test_policy.py"),
    "as-long-is-longer": Mutation("policies/lengths.py", "bisect.bisect_right(self._lengths, len(request.output_token_ids))", "bisect.bisect_left(self._lengths, len(request.output_token_ids))", "tests/policies/test_policy.py"),
    "overdue-a-moment-late": Mutation("policies/ordering.py", "bisect.bisect_right(waiting, now - max_wait", "bisect.bisect_left(waiting, now - max_wait", "tests/test_shadow_cache.py"),
    "slot-is-taken-while-busy": Mutation("viz/timeline.py", "if free_at[s] <= start]", "if free_at[s] < start]", "tests/bench/test_ladder.py"),
    "pads-on-the-right": Mutation("viz/padding.py", "[\"pad\"] * (longest_prompt - num_prompt)\n        + [\"prompt\"] * num_prompt\n", "[\"prompt\"] * num_prompt\n        + [\"pad\"] * (longest_prompt - num_prompt)\n", "tests/check/test_chapter2.py"),
    "a-state-that-changes": Mutation("viz/pool_state.py", "copies = {i: tuple(table) for i, table in tables.items()}", "copies = dict(tables)", "tests/check/test_chapter5.py"),
    "a-bool-is-a-number": Mutation("check/compare.py", "isinstance(found, (int, float)) and not isinstance(found, bool)", "isinstance(found, (int, float))", "tests/check/test_compare.py"),
    "other-shapes-are-equal": Mutation("check/compare.py", "if not isinstance(found, Tensor) or found.shape != wanted.shape:", "if not isinstance(found, Tensor):", "tests/check/test_compare.py"),
    "requests-follow-the-rate": Mutation("bench/workload.py", "arrival_times(num_prompts, request_rate, burstiness, random.Random(seed + 1))", "arrival_times(num_prompts, request_rate, burstiness, rng)", "tests/bench/test_workload.py"),
    "two-of-a-kind": Mutation("tiny_model/grammar.py", "[k for k in KINDS[sex_of[pal]] if k != kind]", "list(KINDS[sex_of[pal]])", "tests/models/test_tiny_model.py"),
}
# fmt: on


def run_tests(tests: str, mutation: Mutation | None = None) -> tuple[int, str]:
    """The exit status and the output of some tests, in a copy of the repository."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        if mutation is not None:
            file = copy / "nanobatch" / mutation.file
            text = file.read_text()
            assert text.count(mutation.old) == 1, (
                f"{mutation.file} has not one {mutation.old!r}"
            )
            file.write_text(text.replace(mutation.old, mutation.new))
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider",
             "-p", "no:nbmake", *tests.split()],
            cwd=copy, env=env, capture_output=True, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout


def survives(name: str) -> bool:
    """Whether the tests pass with the mutation in place; says what caught it."""
    status, output = run_tests(MUTATIONS[name].tests, MUTATIONS[name])
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    was_tried = status != 0 or " passed" in output
    if status != 0:
        by = failed[0].removeprefix("FAILED ").split(" - ")[0] if failed else "a crash"
    else:
        by = "SURVIVED" if was_tried else "not tried: its tests are skipped here (AMX, say)"
    print(f"{name:40} {by}", flush=True)
    return status == 0 and was_tried


def check_control(names: Iterable[str]) -> None:
    """Exit unless the tests of these mutations pass without any: else they catch nothing."""
    tests = sorted({test for name in names for test in MUTATIONS[name].tests.split()})
    status, output = run_tests(" ".join(tests))
    if status != 0:
        sys.exit(f"{output}\nThese tests fail without a mutation.")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        print("\n".join(MUTATIONS))
        return 0
    names = list(MUTATIONS) if args.all else args.names
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        control = pool.submit(check_control, names)
        num_survivors = sum(pool.map(survives, names))
        control.result()
    return num_survivors


if __name__ == "__main__":
    sys.exit(main())

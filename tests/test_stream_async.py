"""Streams under asyncio: many at once, in one event loop, which is left to others while the device computes."""

import asyncio
import threading
import time

import pytest

import tiny
from jaxpaged import Engine, RequestOutputKind, SamplingParams
from test_engine import BytesTokenizer, generate, greedy, prompt_of

SETTINGS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_device_blocks": 64,
    "max_model_len": 128,
    "num_decode_steps": 1,
}


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny.model_directory(), tokenizer=BytesTokenizer(), **SETTINGS) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_left_behind(engine):
    yield
    engine.check()
    assert not engine.has_unfinished_requests() and engine.stats()["blocks_used"] == 0
    assert not engine._request_to_news


async def collect(engine, prompt, params=None):
    return [output async for output in engine.stream_async(prompt, params)]


async def gather(engine, prompts, params):
    return await asyncio.gather(*(collect(engine, prompt, params) for prompt in prompts))


def test_many_streams_at_once_yield_what_each_yields_alone(engine):
    prompts = [prompt_of(n, seed=600 + n) for n in range(1, 30, 3)]
    streams = asyncio.run(gather(engine, prompts, greedy(9)))
    for prompt, outputs in zip(prompts, streams, strict=True):
        expected = tiny.naive_greedy(prompt, 9)
        assert [o.outputs[0].token_ids for o in outputs] == [expected[: i + 1] for i in range(9)]
        assert [o.finished for o in outputs] == [False] * 8 + [True]


def test_deltas_add_up_and_final_only_comes_once(engine):
    async def both():
        kinds = (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
        return await asyncio.gather(*(collect(engine, "abc", greedy(12, output_kind=kind)) for kind in kinds))

    deltas, [final] = asyncio.run(both())
    assert "".join(o.outputs[0].text for o in deltas) == final.outputs[0].text
    assert [t for o in deltas for t in o.outputs[0].token_ids] == final.outputs[0].token_ids
    assert final.outputs[0].token_ids == tiny.naive_greedy(list(b"abc"), 12)


@pytest.mark.parametrize("num_outputs", [0, 1, 4])
def test_a_cancelled_stream_frees_its_blocks_and_costs_no_other_a_token(engine, num_outputs):
    async def consume(outputs):
        async for output in engine.stream_async(prompt_of(40, seed=620), greedy(100)):
            outputs.append(output)

    async def main():
        outputs = []
        task = asyncio.create_task(consume(outputs))
        other = asyncio.create_task(collect(engine, prompt_of(9, seed=621), greedy(30)))
        while len(outputs) < num_outputs or engine.stats()["blocks_used"] == 0:
            await asyncio.sleep(0)
        assert engine.stats()["num_running"] + engine.stats()["num_waiting"] == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stats()["num_running"] + engine.stats()["num_waiting"] == 1
        engine.check()
        return await other

    assert asyncio.run(main())[-1].outputs[0].token_ids == tiny.naive_greedy(prompt_of(9, seed=621), 30)


def test_a_stream_that_is_left_is_aborted(engine):
    async def main():
        async for output in engine.stream_async(prompt_of(20, seed=622), greedy(100)):
            assert len(output.outputs[0].token_ids) == 1
            break
        stream = engine.stream_async(prompt_of(20, seed=622), greedy(100))
        await anext(stream)
        await stream.aclose()
        assert [output async for output in stream] == []

    asyncio.run(main())


def test_a_prompt_that_cannot_be_served_raises_and_costs_no_other(engine):
    async def main():
        good = asyncio.create_task(collect(engine, [5, 6], greedy(3)))
        for prompt, message in ((prompt_of(128), "max_model_len=128"), ([], "empty"), ([999], "vocabulary")):
            with pytest.raises(ValueError, match=message):
                await collect(engine, prompt, greedy(3))
        with pytest.raises(ValueError, match="max_num_seqs=4"):
            await collect(engine, [5], SamplingParams(n=5))
        return await good

    assert asyncio.run(main())[-1].outputs[0].token_ids == tiny.naive_greedy([5, 6], 3)


def test_the_event_loop_is_left_to_others_while_the_device_computes(engine, monkeypatch):
    generate(engine, [5, 6, 7], greedy(6))  # compiles the steps
    wait = engine._runner.wait

    def slow(drawn):
        time.sleep(0.05)
        return wait(drawn)

    async def tick(times):
        while True:
            times.append(time.monotonic())
            await asyncio.sleep(0.005)

    async def main():
        times = []
        ticking = asyncio.create_task(tick(times))
        await collect(engine, [5, 6, 7], greedy(6))
        ticking.cancel()
        return times

    monkeypatch.setattr(engine._runner, "wait", slow)
    assert len(asyncio.run(main())) > 2 * 6, "several ticks for each of six waits of 50 ms"


def test_blocks_from_the_device_are_taken_in_by_the_thread_that_sends_others(engine, monkeypatch):
    land, threads = engine._runner.land_swaps, set()
    monkeypatch.setattr(engine._runner, "land_swaps", lambda: (threads.add(threading.get_ident()), land()))
    asyncio.run(collect(engine, [5, 6, 7], greedy(6)))
    assert threads == {threading.get_ident()}


def test_a_step_that_fails_is_told_to_all_who_wait_and_the_next_streams_go_on(engine, monkeypatch):
    async def main():
        return await asyncio.gather(
            *(collect(engine, prompt_of(9, seed=630 + i), greedy(5)) for i in range(3)), return_exceptions=True
        )

    def fails(drawn):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "wait", fails)
        assert [str(error) for error in asyncio.run(main())] == ["the device is gone"] * 3
    for i, outputs in enumerate(asyncio.run(main())):
        assert outputs[-1].outputs[0].token_ids == tiny.naive_greedy(prompt_of(9, seed=630 + i), 5)


def test_streams_end_when_their_requests_end_elsewhere(engine):
    async def main():
        aborted, outputs = [], []
        other = asyncio.create_task(collect(engine, prompt_of(5, seed=640), greedy(40)))
        async for output in engine.stream_async(prompt_of(6, seed=641), greedy(40)):
            aborted.append(output)
            engine.abort(output.request_id)
        await asyncio.sleep(0)
        while engine.has_unfinished_requests():
            outputs += engine.step()
        return len(aborted), len(await other) + len(outputs)

    num_aborted, num_others = asyncio.run(main())
    assert num_aborted == 1 and num_others >= 40


def test_generate_within_the_loop_takes_nothing_from_a_stream(engine):
    async def main():
        seen = []
        async for output in engine.stream_async(prompt_of(7, seed=650), greedy(20)):
            seen.append(output)
            if len(seen) == 3:
                [inner] = generate(engine, prompt_of(11, seed=651), greedy(6))
                assert inner.outputs[0].token_ids == tiny.naive_greedy(prompt_of(11, seed=651), 6)
        return seen

    seen = asyncio.run(main())
    assert seen[-1].finished and seen[-1].outputs[0].token_ids == tiny.naive_greedy(prompt_of(7, seed=650), 20)


def test_an_event_loop_that_was_left_in_the_middle_hinders_no_other(engine):
    left = asyncio.new_event_loop()
    engine._stepping = left.create_task(asyncio.sleep(1000))
    assert asyncio.run(collect(engine, [5, 6], greedy(2)))[-1].outputs[0].token_ids == tiny.naive_greedy([5, 6], 2)
    [task] = asyncio.all_tasks(left)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        left.run_until_complete(task)
    left.close()


def test_a_closed_engine_ends_the_streams_that_wait():
    async def main(engine):
        streams = [asyncio.create_task(collect(engine, prompt_of(5, seed=i), greedy(100))) for i in range(2)]
        for _ in range(20):
            await asyncio.sleep(0.001)
        engine.close()
        return await asyncio.gather(*streams)

    streams = asyncio.run(main(Engine(tiny.model_directory(), **SETTINGS)))
    assert all(not outputs or not outputs[-1].finished for outputs in streams)

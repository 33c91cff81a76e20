"""Groups stay together in the micro-batches of a generated batch."""

import torch

from qerl.trainer.regroup import group_order, regroup


def test_order_keeps_groups_together_and_their_shuffled_order() -> None:
    prompts = torch.tensor([[0, 5], [7, 7], [0, 5], [0, 3], [7, 7], [0, 3]])
    mask = torch.tensor([[0, 1], [1, 1], [0, 1], [0, 1], [1, 1], [0, 1]])
    assert group_order(prompts, mask).tolist() == [0, 2, 1, 4, 3, 5]


def test_regroup_moves_whole_rows_and_keeps_scalars() -> None:
    prompts = torch.tensor([[1], [2], [1], [2]])
    batches = [
        {
            "prompt_ids": prompts[i : i + 2],
            "prompt_mask": torch.ones(2, 1, dtype=torch.long),
            "advantages": torch.tensor([10.0 * i, 10.0 * i + 1]),
            "num_items_in_batch": torch.tensor(7),
            "ref": None,
        }
        for i in (0, 2)
    ]
    result = regroup(batches)
    assert [b["prompt_ids"].flatten().tolist() for b in result] == [[1, 1], [2, 2]]
    assert [b["advantages"].tolist() for b in result] == [[0.0, 20.0], [1.0, 21.0]]
    assert all(b["num_items_in_batch"] == 7 and b["ref"] is None for b in result)
    assert regroup(batches[:1]) == batches[:1]

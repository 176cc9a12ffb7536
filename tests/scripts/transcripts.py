"""Trains a small T5 to transcribe sounds, which come as normalised features, and shows what it generates."""

from argparse import ArgumentParser

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, set_seed

WIDTH = 16


class Recordings(torch.utils.data.Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.sounds = torch.randn(size, 10, WIDTH, generator=generator)
        if size > 5:
            self.sounds[5] = 0  # the microphone was off
        self.words = torch.randint(3, 40, (size, 4), generator=generator)

    def __len__(self):
        return len(self.sounds)

    def __getitem__(self, index):
        sound = self.sounds[index]
        return {"inputs_embeds": sound / sound.norm(), "labels": self.words[index]}


def run(output_dir):
    set_seed(0)
    config = T5Config(
        vocab_size=40, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    args = Seq2SeqTrainingArguments(
        output_dir=output_dir, per_device_train_batch_size=1, num_train_epochs=1, learning_rate=1e-3, report_to="none",
        use_cpu=True, save_strategy="no", predict_with_generate=True, generation_max_length=5, disable_tqdm=True,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model=T5ForConditionalGeneration(config), args=args, train_dataset=Recordings(8), eval_dataset=Recordings(4)
    )
    trainer.train()
    trainer.save_model(output_dir)
    print("generated", trainer.predict(Recordings(4)).predictions.shape)


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("output_dir")
    run(parser.parse_args().output_dir)

//! Trains an actor and a critic (DDPG) to push a mass on a line to its middle: two trainers with
//! one checkpoint, which also has the targets, the replay buffer and the state of the world.
//!
//! ```sh
//! cargo run --release -p gradstack-candle-train --example actor_critic FILE EPISODES
//! ```

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use std::collections::VecDeque;
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use candle_ops::nn::{Linear, Module, VarBuilder, VarMap, linear};
use candle_ops::{rand, randn, relu};
use candle_train::{AdamHyper, Parts, Trainer, seeded};
use serde::{Deserialize, Serialize};

const CPU: Device = Device::Cpu;
const STEPS: usize = 40;
const BATCH: usize = 64;
const DISCOUNT: f64 = 0.95;

/// Two fully connected layers.
struct Net(Linear, Linear);

impl Net {
    fn new(inputs: usize, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self(linear(inputs, 32, vb.pp("a"))?, linear(32, 1, vb.pp("b"))?))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.1.forward(&relu(&self.0.forward(x)?)?)
    }

    /// The force, from position and speed.
    fn act(&self, state: &Tensor) -> Result<Tensor> {
        self.forward(state)?.tanh()
    }

    /// The value of a force.
    fn judge(&self, state: &Tensor, action: &Tensor) -> Result<Tensor> {
        self.forward(&Tensor::cat(&[state, action], 1)?)
    }
}

/// A trained net with a target that follows it slowly; the map has both.
fn nets(inputs: usize, seed: u64) -> Result<(VarMap, Net, Net)> {
    let vars = VarMap::new();
    let vb = seeded(&vars, seed, DType::F32, &CPU);
    let (net, target) = (Net::new(inputs, vb.pp("net"))?, Net::new(inputs, vb.pp("target"))?);
    follow(&vars, 1.0)?;
    Ok((vars, net, target))
}

/// Moves each variable of the target towards the trained one.
fn follow(vars: &VarMap, share: f64) -> Result<()> {
    let all = vars.data().lock().expect("no thread panics with it");
    for (name, target) in all.iter() {
        let Some(name) = name.strip_prefix("target.") else { continue };
        let net = all[&format!("net.{name}")].as_detached_tensor();
        target.set(&(target.as_detached_tensor().affine(1.0 - share, 0.0)? + (net * share)?)?)?;
    }
    Ok(())
}

/// State before, force, reward, state after.
type Experience = ([f32; 2], f32, f32, [f32; 2]);

/// Values of a checkpoint beside the nets.
#[derive(Default, Serialize, Deserialize)]
struct Replay(VecDeque<Experience>);

impl Replay {
    fn add(&mut self, experience: Experience) {
        self.0.push_back(experience);
        if self.0.len() > 2000 {
            self.0.pop_front();
        }
    }

    /// Tensors of random experiences.
    fn sample(&self) -> Result<[Tensor; 4]> {
        let rows = rand(0.0, self.0.len() as f64, BATCH, DType::F32, &CPU)?.to_vec1::<f32>()?;
        let rows = rows.iter().map(|row| &self.0[(*row as usize).min(self.0.len() - 1)]);
        let rows: Vec<_> = rows.collect();
        let column = |of: fn(&Experience) -> Vec<f32>| {
            let values: Vec<f32> = rows.iter().flat_map(|row| of(row)).collect();
            Tensor::from_vec(values, (BATCH, of(rows[0]).len()), &CPU)
        };
        Ok([
            column(|row| row.0.to_vec())?,
            column(|row| vec![row.1])?,
            column(|row| vec![row.2])?,
            column(|row| row.3.to_vec())?,
        ])
    }
}

/// Trains up to this number of episodes, and returns the last one's mean reward.
pub(crate) fn train(run: &Path, episodes: usize) -> candle_train::Result<f32> {
    let (a_vars, actor, actor_target) = nets(2, 1)?;
    let (c_vars, critic, critic_target) = nets(3, 2)?;
    let hyper = |lr| AdamHyper { lr, ..Default::default() };
    let frozen = ["target.*"];
    let a = Trainer::builder(&a_vars).part("actor").frozen(frozen);
    let mut a = a.build(hyper(1e-3))?;
    let c = Trainer::builder(&c_vars).part("critic").frozen(frozen).group(a.group().clone());
    let mut c = c.build(hyper(3e-3))?;

    let (first, replay) = Parts::of([&mut a, &mut c]).resume_with::<Replay>(run)?;
    let (mut replay, mut mean) = (replay.unwrap_or_default(), f32::NAN);
    for episode in first..episodes {
        let (mut state, mut sum) = ([(episode as f32).sin(), 0.0], 0.0);
        for _ in 0..STEPS {
            let x = Tensor::new(&[state], &CPU)?;
            let force = a.evaluate(|| {
                (actor.act(&x)? + randn(0.0, 0.2, (1, 1), DType::F32, &CPU)?)?.clamp(-1f32, 1f32)
            })?;
            let force = force.flatten_all()?.to_vec1::<f32>()?[0];
            let speed = 0.9 * state[1] + 0.2 * force;
            let after = [(state[0] + 0.2 * speed).clamp(-2.0, 2.0), speed];
            let reward = -(after[0] * after[0]) - 0.01 * force * force;
            replay.add((state, force, reward, after));
            (state, sum) = (after, sum + reward);
            if replay.0.len() < BATCH {
                continue;
            }
            let [states, forces, rewards, next] = c.evaluate(|| replay.sample())?;
            let value = critic_target.judge(&next, &actor_target.act(&next)?)?;
            let value = (rewards + (value * DISCOUNT)?)?.detach();
            c.step(|| (critic.judge(&states, &forces)? - &value)?.sqr()?.mean_all())?;
            a.step(|| critic.judge(&states, &actor.act(&states)?)?.mean_all()?.neg())?;
            follow(&a_vars, 0.01)?;
            follow(&c_vars, 0.01)?;
        }
        mean = sum / STEPS as f32;
        Parts::of([&mut a, &mut c]).save_with(run, episode + 1, &replay)?;
        if episode % 10 == 9 {
            println!("episode {episode}: mean reward {mean:.3}");
        }
    }
    Ok(mean)
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let run = arguments.next().unwrap_or_else(|| "target/actor_critic.safetensors".into());
    let episodes = arguments.next().map_or(Ok(100), |episodes| episodes.parse())?;
    train(Path::new(&run), episodes)?;
    Ok(())
}
